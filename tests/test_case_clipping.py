"""Cases 25 to 31: unscale, norm and clip, their order, and the numbers that are reported."""

import math

import pytest
import torch
from helpers import (
    assert_close,
    clip_factor,
    clocked_sgd,
    each_backend,
    each_optimizer,
    given,
    parameter,
    run_micro_steps,
)
from torch.optim.lr_scheduler import StepLR

from stepclock_ext import ClockedOptimizer, LossScale

each_scale = pytest.mark.parametrize("loss_scale", [1024.0, LossScale(init_scale=1024.0), 3.0])


# 25: the clip sees unscaled gradients.


@each_backend
@each_scale
@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_clip_comes_after_the_unscale(backend, loss_scale, accumulation):
    w = parameter(0.0, 0.0)
    opt = clocked_sgd(
        w,
        gradient_accumulation_steps=accumulation,
        max_grad_norm=1.0,
        loss_scale=loss_scale,
        backend=backend,
    )
    for _ in range(accumulation):
        opt.backward(given((w, [3.0, 4.0])))
        info = opt.step()
    assert_close(w, [-3.0 * clip_factor(5.0, 1.0), -4.0 * clip_factor(5.0, 1.0)])
    assert_close(info.grad_norm, 5.0)
    assert_close(info.clipped_norm, 5.0 * clip_factor(5.0, 1.0))


@each_optimizer
@pytest.mark.parametrize("hooked", [False, True])
def test_every_optimizer_is_handed_the_clipped_gradient(make_optimizer, hooked):
    p, q = parameter(1.0, 2.0), parameter(1.0, 2.0)
    inner, plain = make_optimizer([p]), make_optimizer([q])
    seen = []
    if hooked:
        inner.register_step_pre_hook(lambda *_: seen.append(p.grad.tolist()))
    opt = ClockedOptimizer(
        inner, gradient_accumulation_steps=2, max_grad_norm=1.0, loss_scale=1024.0
    )
    for gradient in ([3.0, 4.0], [0.3, -0.4], [-30.0, 4.0]):
        for _ in range(2):
            opt.backward(given((p, gradient)))
            opt.step()
        q.grad = torch.tensor(gradient)
        torch.nn.utils.clip_grad_norm_([q], 1.0)
        plain.step()
        if hooked:
            assert seen.pop() == pytest.approx(q.grad.tolist(), rel=1e-6)
        assert_close(p, q, num_roundings=16)


# 27: one norm over all groups.


@each_backend
def test_the_norm_is_taken_over_all_groups(backend):
    p, q = parameter(0.0), parameter(0.0)
    inner = torch.optim.SGD([{"params": [p]}, {"params": [q], "lr": 2.0}], lr=1.0)
    opt = ClockedOptimizer(inner, max_grad_norm=1.0, backend=backend)
    opt.backward(3 * p + 4 * q)
    assert opt.step().grad_norm == 5.0
    assert_close(p, -0.6, num_roundings=40)  # 0.6 but for the 1e-6 that torch adds to the norm
    assert_close(q, -1.6, num_roundings=40)


def test_the_norm_is_taken_over_all_optimizers():
    p, q = parameter(0.0), parameter(0.0)
    inner = [torch.optim.SGD([p], lr=1.0), torch.optim.SGD([q], lr=1.0)]
    opt = ClockedOptimizer(inner, max_grad_norm=1.0)
    opt.backward(3 * p + 4 * q)
    assert opt.step().grad_norm == 5.0
    assert_close(p, -3.0 * clip_factor(5.0, 1.0))
    assert_close(q, -4.0 * clip_factor(5.0, 1.0))


@pytest.mark.parametrize("size", [30, 100_003])
def test_cutting_a_tensor_over_three_groups_changes_nothing(size):
    values = torch.randn(size, generator=torch.Generator().manual_seed(0))
    whole = torch.nn.Parameter(torch.zeros(size))
    parts = [torch.nn.Parameter(torch.zeros(len(part))) for part in values.tensor_split(3)]
    groups = [{"params": [part]} for part in parts]
    one = clocked_sgd(whole, max_grad_norm=1.0)
    three = ClockedOptimizer(torch.optim.SGD(groups, lr=1.0), max_grad_norm=1.0)
    one.backward(values @ whole)
    three.backward(values @ torch.cat(parts))
    norms = one.step().grad_norm, three.step().grad_norm
    assert_close(norms[0], norms[1], num_roundings=size)
    assert_close(norms[0], values.double().norm().item(), num_roundings=size)
    assert_close(torch.cat(parts), whole)


# 29: the scale of a window is one number, and is divided out once.


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_scale_set_inside_a_window_waits_for_the_next(dynamic):
    w = parameter(0.0)
    old, new = (LossScale(init_scale=s) if dynamic else s for s in (4.0, 8.0))
    opt = clocked_sgd(w, gradient_accumulation_steps=2, loss_scale=old)
    run_micro_steps(opt, w, [1])
    opt.loss_scale = new
    info = run_micro_steps(opt, w, [1])
    assert_close(w, -1.0)
    assert info.loss_scale == 4.0
    assert opt.loss_scale == new
    assert run_micro_steps(opt, w, [1, 1]).loss_scale == 8.0
    assert_close(w, -2.0)


@pytest.mark.parametrize("growth_interval", [1, 2])
def test_a_scale_grows_between_windows_only(growth_interval):
    w = parameter(0.0)
    scale = LossScale(init_scale=4.0, growth_interval=growth_interval)
    opt = clocked_sgd(w, gradient_accumulation_steps=3, loss_scale=scale)
    scales = [run_micro_steps(opt, w, [1, 2, 3]).loss_scale for _ in range(4)]
    assert scales == ([4.0, 8.0, 16.0, 32.0] if growth_interval == 1 else [4.0, 4.0, 8.0, 8.0])
    assert_close(w, -8.0)


@pytest.mark.parametrize("size", [(), (70_001,)])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_that_the_user_unscales_before_the_step_stay_so(size, accumulation):
    w = torch.nn.Parameter(torch.zeros(size))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    opt = clocked_sgd(w, gradient_accumulation_steps=accumulation)
    for micro in range(accumulation):
        scaler.scale(w.sum()).backward()
        if micro == accumulation - 1:
            scaler.unscale_(opt)
        info = opt.step()
    scaler.update()
    assert_close(w, torch.full(size, -1.0))
    assert_close(info.grad_norm, w.numel() ** 0.5)


@each_backend
@pytest.mark.parametrize("size", [(), (70_001,)])
def test_gradients_that_the_user_changes_before_the_step_are_measured_anew(backend, size):
    w = torch.nn.Parameter(torch.zeros(size))
    opt = clocked_sgd(w, gradient_accumulation_steps=2, backend=backend)
    for c in (2, 6):
        opt.backward(c * w.sum())
        if c == 6:
            w.grad.mul_(0.25)
        info = opt.step()
    assert_close(w, torch.full(size, -1.0))
    assert_close(info.grad_norm, w.numel() ** 0.5)


# 30: bad arguments.


@pytest.mark.parametrize("max_norm", [-1.0, 0.0, math.nan, -math.inf])
def test_a_limit_that_is_not_positive_is_refused(max_norm):
    w = parameter(1.0, 1.0)
    w.grad = torch.tensor([3.0, 4.0])
    with pytest.raises(ValueError, match="max_grad_norm must be positive"):
        clocked_sgd(w, max_grad_norm=max_norm)
    assert w.grad.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("option", ["max_grad_norm", "norm_type", "loss_scale"])
@pytest.mark.parametrize("value", ["1.0", True, [1.0]])
def test_a_number_that_is_none_is_refused(option, value):
    with pytest.raises(TypeError, match=f"{option} must be a number"):
        clocked_sgd(parameter(1.0), **{option: value})


@pytest.mark.parametrize("value", [0.0, -4.0, math.nan, math.inf])
def test_a_scale_that_is_not_positive_and_finite_is_refused(value):
    with pytest.raises(ValueError, match="loss_scale must be positive"):
        clocked_sgd(parameter(1.0), loss_scale=value)


@pytest.mark.parametrize("norm_type", [0.0, -2.0, math.nan])
def test_a_norm_that_does_not_exist_is_refused(norm_type):
    with pytest.raises(ValueError, match="norm_type must be positive"):
        clocked_sgd(parameter(1.0), norm_type=norm_type)


@pytest.mark.parametrize("max_norm", [math.inf, None])
def test_without_a_limit_the_norm_is_reported_and_nothing_is_clipped(max_norm):
    w = parameter(0.0, 0.0)
    opt = clocked_sgd(w, max_grad_norm=max_norm)
    opt.backward(given((w, [3.0, 4.0])))
    info = opt.step()
    assert (info.grad_norm, info.clipped_norm) == (5.0, 5.0)
    assert w.tolist() == [-3.0, -4.0]


def test_generators_are_not_read_twice():
    w = parameter(0.0)
    inner = torch.optim.SGD((p for p in [w]), lr=1.0)
    schedulers = [StepLR(inner, step_size=1, gamma=0.5)]
    opt = ClockedOptimizer(inner, max_grad_norm=1.0, schedulers=(s for s in schedulers))
    run_micro_steps(opt, w, [5])
    assert_close(w, -5.0 * clip_factor(5.0, 1.0))
    assert opt.param_groups[0]["lr"] == 0.5


# 31: the norms that are reported.


@each_backend
def test_both_norms_are_reported(backend):
    w = parameter(0.0, 0.0)
    opt = clocked_sgd(w, max_grad_norm=1.0, backend=backend)
    opt.backward(given((w, [3.0, 4.0])))
    info = opt.step()
    assert info.grad_norm == 5.0
    assert_close(info.clipped_norm, 5.0 * clip_factor(5.0, 1.0))


@each_backend
@pytest.mark.parametrize("accumulation", [1, 2, 4, 16])
def test_the_norm_of_sixteen_samples_does_not_depend_on_the_windows(backend, accumulation):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(16, 5, generator=generator), torch.randn(16, 1, generator=generator)
    model = torch.nn.Linear(5, 1)
    torch.nn.init.constant_(model.weight, 0.5)
    torch.nn.init.zeros_(model.bias)
    opt = ClockedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        gradient_accumulation_steps=accumulation,
        backend=backend,
    )
    for a, b in zip(x.chunk(accumulation), y.chunk(accumulation), strict=True):
        opt.backward((model(a) - b).square().mean())
        info = opt.step()
    residual = x.double().sum(1, keepdim=True) / 2 - y.double()
    by_weight, by_bias = (2 * residual * x).mean(0), (2 * residual).mean()
    expected = math.hypot(*by_weight.tolist(), by_bias.item())
    assert info.grad_norm == pytest.approx(expected, rel=1e-6)


@each_backend
@pytest.mark.parametrize("shape", [(1000,), (10, 100)])
def test_the_norm_of_a_thousand_bf16_ones_has_more_than_three_digits(backend, shape):
    w = torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))
    opt = clocked_sgd(w, backend=backend)
    opt.backward(w.sum())
    assert_close(opt.step().grad_norm, 1000**0.5)


@each_backend
@pytest.mark.parametrize(("norm_type", "norm"), [(2.0, 11.0), (1.0, 17.0), (math.inf, 10.0)])
def test_gradients_of_four_dtypes_have_one_norm(backend, norm_type, norm):
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    params = [parameter(0.0, dtype=dtype) for dtype in dtypes]
    opt = clocked_sgd(*params, norm_type=norm_type, max_grad_norm=norm / 2, backend=backend)
    opt.backward(given(*zip(params, (1.0, 2.0, 4.0, 10.0), strict=True)))
    assert_close(opt.step().grad_norm, norm)
    for p, gradient in zip(params, (1.0, 2.0, 4.0, 10.0), strict=True):
        assert_close(p, -gradient * clip_factor(norm, norm / 2))


@each_backend
@pytest.mark.parametrize("norm_type", [0.5, 1.0, 3.0, math.inf])
@pytest.mark.parametrize("size", [(7,), (70_001,)])
def test_other_norms_clip_as_torch_does(backend, norm_type, size):
    values = torch.randn(size, generator=torch.Generator().manual_seed(0))
    p = torch.nn.Parameter(torch.zeros(size))
    norm = torch.linalg.vector_norm(values.double(), norm_type).item()
    opt = clocked_sgd(
        p,
        gradient_accumulation_steps=2,
        norm_type=norm_type,
        max_grad_norm=norm / 8,
        loss_scale=256.0,
        backend=backend,
    )
    for _ in range(2):
        opt.backward(values @ p)
        info = opt.step()
    assert_close(info.grad_norm, norm, num_roundings=values.numel())
    assert_close(p, values.double() * -clip_factor(norm, norm / 8))
