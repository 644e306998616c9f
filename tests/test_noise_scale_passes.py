"""The noise scale costs no pass over memory and changes no bit."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from helpers import OPTIMIZERS, each_backend, given, snapshot
from noise import SIZES, exact_windows, make_params, make_sgd, run
from tolerance import assert_all_bit_equal

from stepclock_ext import EMA, ClockedOptimizer, LossScale, ops

FP32, BF16 = [torch.float32], [torch.bfloat16]
MIXED = [torch.float32, torch.bfloat16, torch.float64, torch.float16]
each_dtypes = pytest.mark.parametrize("dtypes", [FP32, BF16, MIXED], ids=["fp32", "bf16", "mixed"])
EVERYTHING = sum(torch.Size(size).numel() for size in SIZES)


def count_passes(monkeypatch, backend):
    """Elements that each op on gradients walks from now on, in wrappers made from now on."""
    passes = Counter()

    class Counting(type(ops.make_backend(backend))):
        def sum_squares_(self, slots, tensors, layout):
            passes["sum_squares_"] += _num_elements(tensors)
            super().sum_squares_(slots, tensors, layout)

        def max_abs_(self, slots, tensors, layout):
            passes["max_abs_"] += _num_elements(tensors)
            super().max_abs_(slots, tensors, layout)

        def scale_(self, tensors, stats, layout):
            passes["scale_"] += _num_elements(tensors)
            super().scale_(tensors, stats, layout)

        def accumulate_(self, accumulators, slots, grads, layout, *, store):
            before = Counter(passes)
            super().accumulate_(accumulators, slots, grads, layout, store=store)
            passes.clear()  # one pass, which the reference writes as several
            passes.update(before, accumulate_=_num_elements(grads))

    monkeypatch.setattr(ops, "make_backend", lambda *_: Counting())
    return passes


def _num_elements(tensors):
    return sum(tensor.numel() for tensor in tensors)


@each_backend
@each_dtypes
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.1, "loss_scale": 8.0}])
def test_a_window_of_several_is_read_by_its_accumulation_alone(
    monkeypatch, backend, dtypes, options
):
    """Own-dtype sums begin as the first gradient, which nothing reads; fp32 sums are stored."""
    passes = count_passes(monkeypatch, backend)
    params = make_params(dtypes)
    opt = make_sgd(params, backend=backend, **options)
    infos = run(opt, params, exact_windows(params, 3))
    stored = sum(p.numel() for p in params if p.dtype in ops.HALVES)
    assert all(info.noise_scale is not None for info in infos)
    assert passes == {"accumulate_": 3 * (3 * EVERYTHING + stored)}


@each_backend
@pytest.mark.parametrize("steps", [1, 4])
@each_dtypes
def test_no_gradient_is_read_more_often_than_without(monkeypatch, backend, steps, dtypes):
    """In windows of one, and where a parameter comes once in a window."""
    read = []
    parts = [range(4), range(3), range(4), range(5)][-steps:]
    for noise_scale in (False, True):
        with monkeypatch.context() as patch:
            passes = count_passes(patch, backend)
            params = make_params(dtypes)
            options = {"backend": backend, "gradient_accumulation_steps": steps}
            opt = make_sgd(params, noise_scale=noise_scale, **options)
            run(opt, params, exact_windows(params, 2, weights=[1] * steps, takes_part=parts))
        read.append(passes["sum_squares_"])
    assert read[1] <= read[0]


def _hooked(params):
    inner = OPTIMIZERS["adamw"](params)
    inner.register_step_pre_hook(lambda inner, *_: None)
    return inner


MAKERS = {
    **{name: OPTIMIZERS[name] for name in ("sgd", "adamw", "adagrad", "adagrad_fused")},
    "adamw with a hook": _hooked,
    "two": lambda params: [OPTIMIZERS["sgd"](params[:2]), OPTIMIZERS["adamw"](params[2:])],
}


def train(make, dtypes, *, noise_scale, **options):
    """Four windows: a parameter comes late, one is skipped, one is flushed after two micro steps.

    Returns:
        What happened, and every parameter, state and average.
    """
    params, ema = make_params(dtypes), EMA(0.9)
    opt = ClockedOptimizer(
        make(params),
        gradient_accumulation_steps=3,
        max_grad_norm=1.0,
        loss_scale=LossScale(init_scale=64.0, growth_interval=1),
        ema=ema,
        noise_scale=noise_scale,
        **options,
    )
    generator = torch.Generator().manual_seed(7)
    infos = []
    for number in range(11):
        grads = [torch.randn(p.shape, generator=generator) for p in params]
        if number == 4:
            grads[1][1] = torch.inf
        part = params[:3] if number % 3 == 0 else params
        # Uncaught fp32 gradients lie in .grad; both kinds of sum are the same bits.
        opt.backward(given(*zip(part, grads, strict=False)), weight=1 + number % 3)
        sums = [total.clone() for p in params if (total := opt.accumulated(p)) is not None]
        infos.append((str(replace(opt.step(), noise_scale=None)), sums))
    infos.append((str(replace(opt.end_epoch(), noise_scale=None)), []))
    return infos, snapshot(opt) + [ema.average(p) for p in params]


@each_backend
@each_dtypes
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_nothing_else_changes_by_a_bit(backend, dtypes, make):
    compare(make, dtypes, backend=backend)


@each_backend
@pytest.mark.parametrize(
    "options",
    [{"accumulate_dtype": torch.bfloat16}, {"master_weights": True}, {"rounding": "stochastic"}],
    ids=["own sums", "masters", "stochastic"],
)
def test_nor_does_it_with_16_bit_options(backend, options):
    torch.manual_seed(1)
    compare(OPTIMIZERS["adamw"], BF16, backend=backend, **options)


def compare(make, dtypes, **options):
    off, values_off = train(make, dtypes, noise_scale=False, **options)
    on, values_on = train(make, dtypes, noise_scale=True, **options)
    for (info_off, sums_off), (info_on, sums_on) in zip(off, on, strict=True):
        assert info_on == info_off
        assert_all_bit_equal(sums_on, sums_off)
    assert_all_bit_equal(values_on, values_off)
    assert sum("skipped=True" in info for info, _ in on) == 1
