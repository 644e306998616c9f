"""Section 6 of the design, "The wrapper": windows, weights, refusals, and what a step reports."""

import math

import pytest
import torch
from helpers import (
    assert_close,
    clocked_sgd,
    each_backend,
    each_optimizer,
    parameter,
    run_micro_steps,
    snapshot,
)
from tolerance import assert_all_bit_equal
from torch.optim.lr_scheduler import LambdaLR

from stepclock_ext import ClockedOptimizer, LossScale, NonFiniteGradientError

NAN = math.nan

# The optimizers inside.


def test_the_groups_of_several_optimizers_follow_one_another():
    p, q, r = (parameter(1.0) for _ in range(3))
    first = torch.optim.SGD([{"params": [p]}, {"params": [q], "lr": 0.5}], lr=1.0)
    second = torch.optim.AdamW([r], lr=0.1)
    opt = ClockedOptimizer((first, second))
    expected = [*first.param_groups, *second.param_groups]
    assert len(opt.param_groups) == 3
    assert all(a is b for a, b in zip(opt.param_groups, expected, strict=True))
    opt.backward(p + q + r)
    assert opt.step().lr == (1.0, 0.5, 0.1)


@pytest.mark.parametrize("optimizers", [[], ()])
def test_no_parameter_at_all_is_refused(optimizers):
    with pytest.raises(ValueError, match="at least one parameter"):
        ClockedOptimizer(optimizers)


def test_groups_without_a_parameter_are_refused():
    with pytest.raises(ValueError, match="at least one parameter"):
        ClockedOptimizer(torch.optim.SGD([{"params": []}], lr=1.0))


@pytest.mark.parametrize("optimizer", [None, "sgd", [None], torch.nn.Linear(1, 1)])
def test_what_is_no_optimizer_is_refused(optimizer):
    with pytest.raises(TypeError, match="optimizer"):
        ClockedOptimizer(optimizer)


@pytest.mark.parametrize(
    "option", ["reduction", "nonfinite", "tail", "backend", "max_consecutive_skips"]
)
def test_a_choice_that_does_not_exist_is_refused_by_name(option):
    with pytest.raises((TypeError, ValueError), match=option):
        clocked_sgd(parameter(1.0), **{option: "neither"})


# Plain backward.


@pytest.mark.parametrize("accumulation", [1, 3])
def test_plain_backward_is_a_micro_step_of_weight_1(accumulation):
    w = parameter(1.0)
    opt = clocked_sgd(w, gradient_accumulation_steps=accumulation)
    for c in range(accumulation):
        (c * w).backward()
        info = opt.step()
    assert info.updated
    assert info.loss is None
    assert opt.clock.weight_seen == accumulation
    assert_close(w, 1 - (accumulation - 1) / 2)


@pytest.mark.parametrize("size", [(), (70_001,)])
def test_windows_of_one_leave_accumulation_to_the_trainer(size):
    w = torch.nn.Parameter(torch.zeros(size))
    opt = clocked_sgd(w)
    for _ in range(2):
        for c in (1, 2, 3, 6):
            (c * w.sum() / 4).backward()
        assert opt.step().updated
        opt.zero_grad()
    assert_close(w, torch.full(size, -6.0))
    assert (opt.clock.micro_step, opt.clock.update_step) == (2, 2)


@each_optimizer
def test_a_loop_with_a_gradient_scaler_of_its_own_takes_the_wrapper_as_an_optimizer(make_optimizer):
    p, q = parameter(1.0, 2.0), parameter(1.0, 2.0)
    for w, opt in ((p, ClockedOptimizer(make_optimizer([p]))), (q, make_optimizer([q]))):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for c in (1.0, math.inf, 3.0, -2.0):
            scaler.scale((c * w * w).sum()).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        assert scaler.get_scale() == 512.0
    assert_close(p, q, num_roundings=16)


@pytest.mark.parametrize("loss_scale", [1.0, 4.0, LossScale()])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_plain_backward_with_a_loss_scale_is_an_error_that_names_the_way(loss_scale, accumulation):
    w = parameter(1.0)
    opt = clocked_sgd(w, gradient_accumulation_steps=accumulation, loss_scale=loss_scale)
    w.backward()
    with pytest.raises(RuntimeError, match=r"opt\.backward"):
        opt.step()
    assert w.item() == 1.0


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("loss_scale", [None, LossScale(init_scale=4.0)])
def test_a_window_without_any_backward_neither_updates_nor_skips(accumulation, loss_scale):
    opt = clocked_sgd(
        parameter(1.0), gradient_accumulation_steps=accumulation, loss_scale=loss_scale
    )
    for _ in range(2 * accumulation):
        info = opt.step()
        assert (info.updated, info.skipped) == (False, False)
    assert (opt.clock.update_step, opt.clock.skipped_updates) == (0, 0)
    assert opt.loss_scale == loss_scale


def test_a_backward_through_none_of_the_parameters_is_an_error():
    other = parameter(1.0)
    opt = clocked_sgd(parameter(1.0))
    opt.backward(2 * other)
    with pytest.raises(RuntimeError, match="no parameter holds a gradient"):
        opt.step()


# A backward that fails.


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("out of memory")


@pytest.mark.parametrize("size", [(), (70_001,)])
@pytest.mark.parametrize("failing_micro", [0, 1, 2])
def test_a_window_with_a_failed_backward_is_cleared_by_discard_and_repeated(size, failing_micro):
    p, q = (torch.nn.Parameter(torch.zeros(size)) for _ in range(2))
    opt = clocked_sgd(p, q, gradient_accumulation_steps=3)
    run_micro_steps(opt, p, [1] * 3)
    before = p.detach().clone()
    run_micro_steps(opt, p, [1000] * failing_micro)
    with pytest.raises(ArithmeticError):
        opt.backward(p.sum() + Fails.apply(q).sum())  # p's gradient has arrived by then
    with pytest.raises(RuntimeError, match=r"discard\(\)"):
        opt.step()
    with pytest.raises(RuntimeError, match=r"discard\(\)"):
        opt.backward(p.sum())
    assert_all_bit_equal([p.detach()], [before])
    opt.discard()
    assert opt.clock.micro_step == 3
    for c in (1, 2, 6):
        opt.backward(c * (p + q).sum())
        info = opt.step()
    assert info.updated
    assert_close(q, torch.full(size, -3.0))
    assert_close(p, before - 3.0)


def test_an_exception_in_a_closure_is_no_micro_step():
    w = parameter(1.0)
    opt = clocked_sgd(w, gradient_accumulation_steps=2)

    def closure():
        opt.backward(1000 * w)
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        opt.step(closure)
    opt.discard()
    run_micro_steps(opt, w, [1, 3])
    assert_close(w, 1 - 2.0)
    assert opt.clock.micro_step == 2


# Weight 0.


@each_backend
def test_a_micro_step_of_weight_0_counts_and_adds_nothing(backend):
    w = parameter(1.0)
    opt = clocked_sgd(w, gradient_accumulation_steps=3, backend=backend)
    info = run_micro_steps(opt, w, [1, NAN, 3], weights=[1, 0, 1])
    assert info.updated
    assert (info.loss, info.grad_norm) == (2.0, 2.0)
    assert_close(w, 1 - 2.0)
    assert (opt.clock.micro_step, opt.clock.weight_seen) == (3, 2)


def test_the_backward_of_weight_0_is_not_run():
    w = parameter(1.0)
    opt = clocked_sgd(w)
    opt.backward(Fails.apply(w), weight=0)
    opt.backward(torch.tensor(NAN), weight=0)  # nothing to differentiate is fine as well
    assert w.grad is None
    w.grad = torch.ones(())  # of whoever
    info = opt.step()
    assert (info.updated, info.skipped, w.item()) == (False, False, 1.0)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_window_of_total_weight_0_moves_nothing_and_backs_nothing_off(accumulation):
    w = parameter(1.0)
    inner = torch.optim.AdamW([w], lr=0.1)
    scheduler = LambdaLR(inner, lambda t: 1 / (1 + t))
    opt = ClockedOptimizer(
        inner,
        gradient_accumulation_steps=accumulation,
        loss_scale=LossScale(init_scale=4.0, growth_interval=1),
        schedulers=[scheduler],
    )
    info = run_micro_steps(opt, w, [NAN] * accumulation, weights=[0] * accumulation)
    assert (info.updated, info.skipped) == (False, False)
    assert (opt.clock.micro_step, opt.clock.update_step) == (accumulation, 0)
    assert opt.clock.skipped_updates == 0
    assert opt.loss_scale.scale == 4.0
    assert scheduler.last_epoch == 0
    assert w.item() == 1.0
    assert not inner.state


@pytest.mark.parametrize("weight", [-1, NAN, math.inf, "3", torch.ones(2)])
def test_a_weight_that_is_no_finite_number_is_refused_before_anything_is_added(weight):
    w = parameter(1.0)
    opt = clocked_sgd(w)
    with pytest.raises((TypeError, ValueError), match="weight"):
        opt.backward(w, weight=weight)
    assert w.grad is None
    assert run_micro_steps(opt, w, [1]).updated


@pytest.mark.parametrize("loss", [1.0, torch.ones(2, requires_grad=True), torch.tensor(1.0)])
def test_what_is_no_loss_is_refused_before_anything_is_counted(loss):
    w = parameter(1.0)
    opt = clocked_sgd(w)
    with pytest.raises((TypeError, ValueError), match="loss"):
        opt.backward(loss)
    assert run_micro_steps(opt, w, [1]).loss == 1.0


# The clip.


@each_backend
@pytest.mark.parametrize("norm", [1e-6, 1.0, 0.999999, 3.0])
def test_the_clip_factor_is_that_of_torch(backend, norm):
    w = parameter(0.0, dtype=torch.float64)
    opt = clocked_sgd(w, max_grad_norm=norm if norm < 3.0 else 1.0, backend=backend)
    info = run_micro_steps(opt, w, [norm])
    v = parameter(0.0, dtype=torch.float64)
    v.grad = torch.tensor(norm, dtype=torch.float64)
    torch.nn.utils.clip_grad_norm_([v], norm if norm < 3.0 else 1.0)
    assert_close(w, -v.grad)
    assert_close(info.clipped_norm, v.grad.item())


# Skips.


def test_propagate_with_a_dynamic_scale_is_refused():
    with pytest.raises(ValueError, match="propagate"):
        clocked_sgd(parameter(1.0), nonfinite="propagate", loss_scale=LossScale())
    opt = clocked_sgd(parameter(1.0), nonfinite="propagate", loss_scale=4.0)
    with pytest.raises(ValueError, match="propagate"):
        opt.loss_scale = LossScale()


def test_the_limit_of_skips_raises_after_that_skip_has_settled():
    w = parameter(1.0)
    scale = LossScale(init_scale=16.0)
    opt = clocked_sgd(w, momentum=0.9, max_consecutive_skips=2, loss_scale=scale)
    run_micro_steps(opt, w, [1, NAN])
    before = snapshot(opt)
    with pytest.raises(NonFiniteGradientError):
        run_micro_steps(opt, w, [NAN])
    assert (opt.clock.micro_step, opt.clock.skipped_updates) == (3, 2)
    assert opt.loss_scale.scale == 4.0
    assert_all_bit_equal(snapshot(opt), before)
    assert run_micro_steps(opt, w, [1]).updated
