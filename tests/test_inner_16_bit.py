"""What an inner optimizer that steps by itself is handed of an fp32 sum, and what its hooks see."""

import copy
import math
from functools import partial

import pytest
import torch
from helpers import clip_factor, each_backend, given
from tensors import HALVES, dtype_name
from tolerance import assert_all_bit_equal, assert_bit_equal

from stepclock_ext import ClockedOptimizer

each_half = pytest.mark.parametrize("dtype", HALVES, ids=dtype_name)
SHAPES = [(8, 5), (6, 11_000)]
NUM_MICRO = 4


class Recorder(torch.optim.AdamW):
    """A user's own AdamW, which keeps the gradients of its steps."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.seen = []

    def step(self, closure=None):
        self.seen.append([p.grad.clone() for g in self.param_groups for p in g["params"]])
        return super().step(closure)


MAKERS = {
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "Adagrad fused": partial(torch.optim.Adagrad, lr=0.1, fused=True),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.1, momentum=0.5),
    "Muon": partial(torch.optim.Muon, lr=0.1),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.1),
    "a subclass of AdamW": partial(Recorder, lr=0.1),
}


def parameters(dtype):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def gradients(dtype, window):
    generator = torch.Generator().manual_seed(1 + window)
    return [
        [torch.randn(s, generator=generator).to(dtype) for s in SHAPES] for _ in range(NUM_MICRO)
    ]


def fp32_sums(micros):
    sums = [torch.zeros(shape) for shape in SHAPES]
    for grads in micros:
        sums = [total + grad.float() for total, grad in zip(sums, grads, strict=True)]
    return sums


def run_window(opt, params, micros):
    for grads in micros:
        opt.backward(given(*zip(params, grads, strict=True)))
        assert [p.grad for p in params] == [None] * len(params)
        info = opt.step()
    assert [p.grad for p in params] == [None] * len(params)
    return info


def wrap(inner, backend="auto", **options):
    options = {"gradient_accumulation_steps": NUM_MICRO, **options}
    return ClockedOptimizer(inner, backend=backend, **options)


@each_backend
@each_half
@pytest.mark.parametrize("name", MAKERS)
def test_an_optimizer_without_a_rule_steps_as_on_the_fp32_mean_rounded_once(backend, dtype, name):
    params, others = parameters(dtype), parameters(dtype)
    opt, plain = wrap(MAKERS[name](params), backend), MAKERS[name](others)
    for window in range(3):
        micros = gradients(dtype, window)
        assert run_window(opt, params, micros).updated
        for q, total in zip(others, fp32_sums(micros), strict=True):
            q.grad = (total / NUM_MICRO).to(dtype)  # a quarter is exact
        plain.step()
        assert_all_bit_equal([p.detach() for p in params], [q.detach() for q in others])


@each_backend
@each_half
def test_several_optimizers_share_one_window_and_each_gets_its_part(backend, dtype):
    params, others = parameters(dtype), parameters(dtype)
    inner = [torch.optim.Muon(params[:1], lr=0.1), torch.optim.Adagrad(params[1:], lr=0.1)]
    plain = [torch.optim.Muon(others[:1], lr=0.1), torch.optim.Adagrad(others[1:], lr=0.1)]
    opt = wrap(inner, backend)
    for window in range(3):
        micros = gradients(dtype, window)
        sums = fp32_sums(micros)
        exact = math.sqrt(sum((s.double() / 4).square().sum().item() for s in sums))
        assert run_window(opt, params, micros).grad_norm == pytest.approx(exact, rel=1e-6)
        for q, total in zip(others, sums, strict=True):
            q.grad = (total / NUM_MICRO).to(dtype)
        for each in plain:
            each.step()
        assert_all_bit_equal([p.detach() for p in params], [q.detach() for q in others])


@each_backend
@each_half
@pytest.mark.parametrize("scale", [None, 8.0])
def test_with_clip_weights_and_scale_the_gradient_is_rounded_once(backend, dtype, scale):
    params = parameters(dtype)
    inner = Recorder(params, lr=0.1)
    opt = wrap(inner, backend, max_grad_norm=0.9, loss_scale=scale)
    micros, weights = gradients(dtype, 0), (1, 2, 4, 2)  # powers of two: seeds change no digit
    for grads, weight in zip(micros, weights, strict=True):
        opt.backward(given(*zip(params, grads, strict=True)), weight=weight)
        info = opt.step()
    sums = [
        sum(w * grads[row].double() for w, grads in zip(weights, micros, strict=True))
        for row in range(len(SHAPES))
    ]
    means = [total / sum(weights) for total in sums]
    norm = math.sqrt(sum(mean.square().sum().item() for mean in means))
    assert info.grad_norm == pytest.approx(norm, rel=1e-6)
    ((*seen,),) = inner.seen
    for got, mean in zip(seen, means, strict=True):
        assert got.dtype == dtype
        exact = mean * clip_factor(norm, 0.9)
        gap = torch.finfo(dtype).eps * torch.exp2(exact.abs().log2().floor())
        gap = gap.clamp(min=torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)
        fp32_error = 2.0**-20 * exact.abs() + 2.0**-21 * clip_factor(norm, 0.9)
        assert ((got.double() - exact).abs() <= gap / 2 + fp32_error).all()


@each_half
def test_a_subclass_gets_its_gradient_once_an_update_and_never_on_a_skip(dtype):
    params = parameters(dtype)
    inner = Recorder(params, lr=0.1)
    opt = wrap(inner)
    for window in range(3):
        micros = gradients(dtype, window)
        if window == 1:
            micros[2][0][3, 3] = math.nan
        run_window(opt, params, micros)
    assert (opt.clock.update_step, opt.clock.skipped_updates) == (2, 1)
    expected = [[(s / 4).to(dtype) for s in fp32_sums(gradients(dtype, w))] for w in (0, 2)]
    assert len(inner.seen) == 2
    for got, want in zip(inner.seen, expected, strict=True):
        assert_all_bit_equal(got, want)


# Step hooks on AdamW, which has a rule.


def adamw(params):
    return torch.optim.AdamW(params, lr=0.1, weight_decay=0.1)


@each_backend
@each_half
@pytest.mark.parametrize("masters", [False, True])
def test_hooks_see_gradient_and_update_once_each_and_never_a_skip(backend, dtype, masters):
    params = parameters(dtype)
    inner, events = adamw(params), []

    def pre(*_):
        events.append(("pre", [(p.grad.clone(), p.detach().clone()) for p in params]))

    def post(*_):
        events.append(("post", [(p.grad.clone(), p.detach().clone()) for p in params]))

    inner.register_step_pre_hook(pre)
    inner.register_step_post_hook(post)
    opt = wrap(inner, backend, master_weights=masters)
    for window in range(3):
        before = [p.detach().clone() for p in params]
        micros = gradients(dtype, window)
        if window == 1:
            micros[0][1][0, 0] = math.inf
        events.clear()
        info = run_window(opt, params, micros)
        if window == 1:
            assert (info.skipped, events) == (True, [])
            continue
        assert [name for name, _ in events] == ["pre", "post"]
        means = [(s / NUM_MICRO).to(dtype) for s in fp32_sums(micros)]
        assert_all_bit_equal([grad for grad, _ in events[0][1]], means)
        assert_all_bit_equal([value for _, value in events[0][1]], before)
        assert_all_bit_equal([value for _, value in events[1][1]], [p.detach() for p in params])
        assert all((a != b.detach()).any() for a, b in zip(before, params, strict=True))


@each_backend
@each_half
@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_what_a_pre_hook_makes_of_the_gradient_counts(backend, dtype, masters, how):
    results = []
    for hooked in (True, False):
        params = parameters(dtype)
        inner = adamw(params)

        def change(*_, params=params, factor=-2 if hooked else 1):
            for p in params:
                if how == "in place":
                    p.grad.mul_(factor)
                else:
                    p.grad = factor * p.grad

        inner.register_step_pre_hook(change)
        opt = wrap(inner, backend, master_weights=masters)
        for window in range(2):
            micros = gradients(dtype, window)
            run_window(opt, params, [[g if hooked else -2 * g for g in grads] for grads in micros])
        states = [inner.state[p]["exp_avg"] for p in params]
        results.append([*(p.detach() for p in params), *states])
    assert_all_bit_equal(*results)


@each_backend
@each_half
def test_a_pre_hook_that_only_reads_leaves_the_sum_unrounded(backend, dtype):
    results = []
    for hooked in (True, False):
        params = parameters(dtype)
        inner = adamw(params)
        if hooked:
            inner.register_step_pre_hook(lambda *_: None)
        opt = wrap(inner, backend)
        run_window(opt, params, gradients(dtype, 0))
        results.append(
            [*(p.detach() for p in params), *(inner.state[p]["exp_avg"] for p in params)]
        )
    assert_all_bit_equal(*results)


@each_half
def test_a_pre_hook_that_leaves_no_gradient_is_an_error_before_anything_moves(dtype):
    params = parameters(dtype)
    before = [p.detach().clone() for p in params]
    inner = adamw(params)
    inner.register_step_pre_hook(lambda *_: setattr(params[1], "grad", None))
    opt = wrap(inner)
    with pytest.raises(RuntimeError, match="step hook must leave every gradient"):
        run_window(opt, params, gradients(dtype, 0))
    assert_all_bit_equal([p.detach() for p in params], before)


@each_backend
@each_half
@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
def test_hooks_go_on_firing_when_the_window_becomes_one_and_long_again(backend, dtype, name):
    params = parameters(dtype)
    inner, fired = getattr(torch.optim, name)(params, lr=0.1), []
    if name == "SGD":
        inner.param_groups[0]["momentum"] = 0.9
    inner.register_step_post_hook(lambda *_: fired.append(copy.copy(opt.clock.update_step)))
    opt = wrap(inner, backend)
    for window, accumulation in enumerate((4, 1, 4, 1)):
        opt.gradient_accumulation_steps = accumulation
        before = [p.detach().clone() for p in params]
        for grads in gradients(dtype, window)[:accumulation]:
            opt.backward(given(*zip(params, grads, strict=True)))
            info = opt.step()
        assert info.updated
        assert all((a != b.detach()).any() for a, b in zip(before, params, strict=True))
    assert fired == [0, 1, 2, 3]


@each_half
def test_a_hook_finds_bits_of_no_other_gradient_than_the_true_one(dtype):
    params = parameters(dtype)
    inner, seen = torch.optim.SGD(params, lr=0.0), []
    inner.register_step_pre_hook(lambda *_: seen.append([p.grad.clone() for p in params]))
    opt = wrap(inner, max_grad_norm=1e9)
    run_window(opt, params, gradients(dtype, 7))
    for got, total in zip(seen[0], fp32_sums(gradients(dtype, 7)), strict=True):
        assert_bit_equal(got, (total / 4).to(dtype))
