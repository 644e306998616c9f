"""fp32 sums to the bit: skips leave everything as it was, and no way through a window differs."""

import math

import pytest
import torch
from helpers import each_backend, given, snapshot
from tensors import BACKENDS, HALVES, dtype_name
from tolerance import assert_all_bit_equal

from stepclock_ext import ClockedOptimizer, LossScale, NonFiniteGradientError

each_half = pytest.mark.parametrize("dtype", HALVES, ids=dtype_name)
needs_cpu = pytest.mark.skipif("cpu" not in BACKENDS, reason="the kernels were not built")
SIZES = [(), (3,), (255,), (300, 301), (70_001,)]
MAKERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
}
each_maker = pytest.mark.parametrize("name", MAKERS)


def parameters(dtype):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SIZES]


def micro_step(opt, params, number, *, bad=None):
    generator = torch.Generator().manual_seed(number)
    grads = [torch.randn(p.shape, generator=generator) for p in params]
    if bad is not None:
        grads[-1][12_345] = bad
    used = [*zip(params, grads, strict=True)][number % 3 == 1 :]
    opt.backward(given(*used), weight=1 + number % 2)
    return opt.step()


def everything(opt, params):
    return [*snapshot(opt), *(opt.master_weight(p).clone() for p in params)]


# Skips.


@each_backend
@each_half
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("bad_micro", [0, 1, 2])
@pytest.mark.parametrize("masters", [False, True])
def test_a_skip_leaves_parameters_moments_and_masters_as_they_were(
    backend, dtype, bad, bad_micro, masters
):
    params = parameters(dtype)
    opt = ClockedOptimizer(
        MAKERS["AdamW"](params),
        gradient_accumulation_steps=3,
        max_grad_norm=1.0,
        master_weights=masters,
        loss_scale=LossScale(init_scale=4.0),
        backend=backend,
    )
    for micro in range(3):
        assert micro_step(opt, params, micro).updated == (micro == 2)
    before = everything(opt, params)
    for micro in range(3):
        info = micro_step(opt, params, micro, bad=bad if micro == bad_micro else None)
    assert (info.updated, info.skipped) == (False, True)
    assert not math.isfinite(info.grad_norm)
    assert_all_bit_equal(everything(opt, params), before)
    assert opt.loss_scale.scale == 2.0
    for micro in range(3):
        info = micro_step(opt, params, micro)
    assert info.updated


@each_backend
def test_a_seed_that_overflows_fp16_gradients_is_a_skip_and_the_scale_backs_off(backend):
    w = torch.nn.Parameter(torch.zeros(3, dtype=torch.float16))
    opt = ClockedOptimizer(
        torch.optim.SGD([w], lr=1.0),
        gradient_accumulation_steps=2,
        loss_scale=LossScale(init_scale=65536.0),
        backend=backend,
    )
    outcomes = []
    while opt.clock.update_step == 0:
        for _ in range(2):
            opt.backward((w * 3.0).float().sum())
            info = opt.step()
        outcomes.append((info.skipped, info.loss_scale))
    # 3 * 16384 fits in fp16, 3 * 32768 does not; the sum of two of them need not
    assert outcomes == [(True, 65536.0), (True, 32768.0), (False, 16384.0)]
    assert w.tolist() == [-3.0] * 3


@each_backend
@each_half
def test_a_scale_that_finds_no_ground_stops_at_its_floor_and_says_what_overflowed(backend, dtype):
    model = torch.nn.Linear(2, 1, bias=False).to(dtype)
    w = model.weight
    before = w.detach().clone()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda t: 1 / (1 + t))
    opt = ClockedOptimizer(
        inner,
        gradient_accumulation_steps=2,
        loss_scale=LossScale(init_scale=4.0, min_scale=1.0),
        max_consecutive_skips=3,
        schedulers=[scheduler],
        model=model,
        backend=backend,
    )
    scales = [opt.loss_scale.scale]
    with pytest.raises(NonFiniteGradientError, match=r"3 skips in a row .* weight") as caught:
        for micro in range(6):
            opt.backward(given((w, torch.full((1, 2), math.inf if micro % 2 else 1.0))))
            try:
                opt.step()
            finally:
                if micro % 2:
                    scales.append(opt.loss_scale.scale)
    assert scales == [4.0, 2.0, 1.0, 1.0]
    assert caught.value.parameters == ["weight"]
    assert (opt.clock.update_step, opt.clock.skipped_updates, scheduler.last_epoch) == (0, 3, 0)
    assert_all_bit_equal([w.detach()], [before])
    assert not inner.state
    assert opt.accumulated(w) is None


# One result, whatever the way.


def train(dtype, name, *, backend, steps, flushed=False, asked=False, **options):
    """Two windows of four micro steps; the norms, and everything that training leaves."""
    params = parameters(dtype)
    opt = ClockedOptimizer(
        MAKERS[name](params), gradient_accumulation_steps=steps, backend=backend, **options
    )
    norms = []
    for window in range(2):
        for micro in range(4):
            info = micro_step(opt, params, 4 * window + micro)
            if asked:
                [opt.accumulated(p) for p in params]
        if flushed:
            info = opt.flush()
        assert info.updated
        norms.append(info.grad_norm)
    return [torch.tensor(norms, dtype=torch.float64), *everything(opt, params)]


@each_backend
@each_half
@each_maker
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_norms_that_ride_and_norms_that_are_read_are_one_to_the_bit(backend, dtype, name, max_norm):
    rode = train(dtype, name, backend=backend, steps=4, max_grad_norm=max_norm)
    read = train(dtype, name, backend=backend, steps=5, flushed=True, max_grad_norm=max_norm)
    assert_all_bit_equal(rode, read)


@needs_cpu
@each_half
@pytest.mark.parametrize("name", ["AdamW", "RMSprop"])
def test_one_thread_and_two_give_the_same_bits(dtype, name):
    threads, results = torch.get_num_threads(), []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            results.append(train(dtype, name, backend="cpu", steps=4, max_grad_norm=0.5))
    finally:
        torch.set_num_threads(threads)
    assert_all_bit_equal(*results)


@each_backend
@each_half
@each_maker
def test_a_window_is_the_same_however_often_its_sums_are_looked_at(backend, dtype, name):
    options = {"backend": backend, "steps": 4, "max_grad_norm": 0.5}
    assert_all_bit_equal(train(dtype, name, **options), train(dtype, name, asked=True, **options))


@each_backend
@each_half
def test_a_window_after_a_skipped_one_or_a_discarded_one_is_as_if_it_were_the_first(backend, dtype):
    results = []
    for earlier in ("nothing", "skip", "discard"):
        params = parameters(dtype)
        opt = ClockedOptimizer(
            MAKERS["AdamW"](params), gradient_accumulation_steps=3, backend=backend
        )
        if earlier != "nothing":
            for micro in range(3 if earlier == "skip" else 2):
                micro_step(opt, params, 50 + micro, bad=math.inf)
            opt.discard()
        for micro in range(3):
            info = micro_step(opt, params, micro)
        results.append([torch.tensor(info.grad_norm), *everything(opt, params)])
    for other in results[1:]:
        assert_all_bit_equal(other, results[0])
