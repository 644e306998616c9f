"""Cases 32 and 35: gradients that are NaN or infinite, and those that only look so."""

import math

import pytest
import torch
from helpers import (
    assert_close,
    clocked_sgd,
    each_backend,
    each_optimizer,
    given,
    parameter,
    run_micro_steps,
    snapshot,
)
from tolerance import assert_all_bit_equal, assert_bit_equal
from torch.optim.lr_scheduler import LambdaLR

from stepclock_ext import ClockedOptimizer, LossScale, NonFiniteGradientError

INF, NAN = math.inf, math.nan
each_bad = pytest.mark.parametrize("bad", [INF, -INF, NAN])


# 32: a skip is atomic.


@each_optimizer
@each_backend
@pytest.mark.parametrize("bad_micro", [0, 1, 2])
def test_a_skip_leaves_every_tensor_bit_equal(make_optimizer, backend, bad_micro):
    p, q = parameter(1.0, 2.0), parameter(3.0)
    opt = ClockedOptimizer(
        make_optimizer([p, q]), gradient_accumulation_steps=3, max_grad_norm=1.0, backend=backend
    )
    for _ in range(3):
        opt.backward(given((p, [3.0, -4.0]), (q, 1.0)))
        assert not opt.step().skipped
    before = snapshot(opt)
    for micro in range(3):
        opt.backward(given((p, [INF if micro == bad_micro else 1.0, 1.0]), (q, 1.0)))
        info = opt.step()
    assert (info.updated, info.skipped) == (False, True)
    assert_all_bit_equal(snapshot(opt), before)


@each_optimizer
@each_bad
def test_a_skip_of_the_very_first_window_leaves_no_trace(make_optimizer, bad):
    p, q = parameter(1.0, 2.0), parameter(1.0, 2.0)
    opt = ClockedOptimizer(make_optimizer([p]), loss_scale=LossScale(init_scale=4.0))
    plain = make_optimizer([q])
    opt.backward(given((p, [1.0, bad])))
    assert opt.step().skipped
    assert p.tolist() == [1.0, 2.0]
    for gradient in ([3.0, -4.0], [0.5, 0.25]):
        opt.backward(given((p, gradient)))
        opt.step()
        q.grad = torch.tensor(gradient)
        plain.step()
    assert_close(p, q, num_roundings=16)


@each_backend
@each_bad
@pytest.mark.parametrize("norm_type", [2.0, INF, 1.0])
@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("loss_scale", [None, 1024.0])
def test_the_check_is_always_on(backend, bad, norm_type, max_norm, loss_scale):
    w = parameter(1.0, 1.0)
    opt = clocked_sgd(
        w, norm_type=norm_type, max_grad_norm=max_norm, loss_scale=loss_scale, backend=backend
    )
    opt.backward(given((w, [bad, 1.0])))
    info = opt.step()
    assert info.skipped
    assert not math.isfinite(info.grad_norm)
    assert w.tolist() == [1.0, 1.0]


@each_backend
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("place", [0, 16_383, 16_384, 69_999, 70_000])
def test_one_bad_value_is_found_wherever_it_lies(backend, accumulation, place):
    small, large = parameter(1.0), torch.nn.Parameter(torch.ones(70_001))
    opt = clocked_sgd(small, large, gradient_accumulation_steps=accumulation, backend=backend)
    gradient = torch.ones(70_001)
    for micro in range(accumulation):
        gradient[place] = NAN if micro == accumulation - 1 else 1.0
        opt.backward(given((large, gradient), (small, 1.0)))
        info = opt.step()
    assert info.skipped
    assert_bit_equal(large.detach(), torch.ones(70_001))
    assert small.item() == 1.0


def test_one_bad_gradient_stops_all_optimizers():
    p, q = parameter(1.0), parameter(1.0)
    inner = [torch.optim.SGD([p], lr=1.0), torch.optim.AdamW([q], lr=0.1)]
    opt = ClockedOptimizer(inner)
    opt.backward(given((p, 1.0), (q, NAN)))
    assert opt.step().skipped
    assert (p.item(), q.item()) == (1.0, 1.0)
    assert not inner[1].state


def test_the_window_after_a_skip_starts_from_nothing():
    w = parameter(0.0)
    opt = clocked_sgd(w, gradient_accumulation_steps=2)
    run_micro_steps(opt, w, [1000, INF])
    assert run_micro_steps(opt, w, [1, 3]).grad_norm == 2.0
    assert_close(w, -2.0)


@each_bad
def test_raise_names_the_parameters_concerned_and_moves_nothing(bad):
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    opt = ClockedOptimizer(inner, max_grad_norm=1.0, nonfinite="raise", model=model)
    opt.backward(given((model.weight, [[1.0, 1.0]]), (model.bias, [1.0])))
    opt.step()
    before = snapshot(opt)
    opt.backward(given((model.weight, [[1.0, 1.0]]), (model.bias, [bad])))
    with pytest.raises(NonFiniteGradientError, match="bias") as caught:
        opt.step()
    assert caught.value.parameters == ["bias"]
    assert_all_bit_equal(snapshot(opt), before)
    opt.discard()
    opt.backward(given((model.weight, [[1.0, 1.0]]), (model.bias, [1.0])))
    assert opt.step().updated


def test_without_a_model_a_parameter_is_named_by_its_place():
    p, q, r = (parameter(1.0) for _ in range(3))
    inner = torch.optim.SGD([{"params": [p]}, {"params": [q, r]}], lr=1.0)
    opt = ClockedOptimizer(inner, nonfinite="raise")
    opt.backward(given((p, INF), (q, 1.0), (r, NAN)))
    with pytest.raises(NonFiniteGradientError) as caught:
        opt.step()
    assert caught.value.parameters == ["group 0, parameter 0", "group 1, parameter 1"]


@each_backend
def test_propagate_updates_all_the_same(backend):
    p, q = parameter(1.0), parameter(1.0)
    opt = clocked_sgd(p, q, nonfinite="propagate", backend=backend)
    opt.backward(given((p, NAN), (q, 0.5)))
    info = opt.step()
    assert (info.updated, info.skipped) == (True, False)
    assert math.isnan(p.item())
    assert q.item() == 0.5
    assert (opt.clock.update_step, opt.clock.skipped_updates) == (1, 0)


@each_optimizer
@pytest.mark.parametrize("bad", [INF, NAN])
def test_propagate_moves_every_optimizer_as_the_plain_loop_does(make_optimizer, bad):
    p, q = parameter(1.0, 1.0), parameter(1.0, 1.0)
    opt = ClockedOptimizer(make_optimizer([p]), max_grad_norm=1.0, nonfinite="propagate")
    plain = make_optimizer([q])
    opt.backward(given((p, [bad, 1.0])))
    assert opt.step().updated
    q.grad = torch.tensor([bad, 1.0])
    torch.nn.utils.clip_grad_norm_([q], 1.0)
    plain.step()
    assert_close(p, q, num_roundings=16)


# What is finite is never taken for an overflow, what is small never for zero.


@each_backend
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.float32, 1e30),
        (torch.float32, 1e-30),
        (torch.float64, 1e200),
        (torch.float64, 1e-200),
        (torch.complex64, 1e30),
    ],
)
def test_the_norm_neither_overflows_nor_underflows(backend, accumulation, dtype, value):
    w = torch.nn.Parameter(torch.zeros(70_001, dtype=dtype))
    opt = clocked_sgd(w, gradient_accumulation_steps=accumulation, backend=backend)
    for _ in range(accumulation):
        opt.backward(given((w, torch.full_like(w, value))))
        info = opt.step()
    assert info.updated
    assert info.grad_norm == pytest.approx(value * 70_001**0.5, rel=1e-6, abs=0)


@each_backend
def test_bf16_gradients_near_the_end_of_their_range_are_finite(backend):
    w = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    opt = clocked_sgd(w, max_grad_norm=1.0, backend=backend)
    opt.backward(given((w, torch.full((4,), 2.0**127))))
    info = opt.step()
    assert info.grad_norm == 2.0**128
    assert_close(w, [-0.5] * 4)


def test_a_gradient_that_overflows_only_when_scaled_backs_the_scale_off():
    w = parameter(0.0)
    opt = clocked_sgd(w, loss_scale=LossScale(init_scale=1024.0))
    opt.backward(given((w, 1e36)))
    assert opt.step().skipped
    opt.loss_scale = LossScale(init_scale=16.0, min_scale=1.0)
    opt.backward(given((w, 1e36)))
    assert opt.step().grad_norm == pytest.approx(1e36)


# 35: the scale has a floor, skips have a limit.


@pytest.mark.parametrize("accumulation", [1, 2])
def test_endless_overflow_stops_at_the_floor_and_at_the_limit_of_skips(accumulation):
    w = parameter(1.0)
    inner = torch.optim.SGD([w], lr=1.0)
    scheduler = LambdaLR(inner, lambda t: 1 / (1 + t))
    opt = ClockedOptimizer(
        inner,
        gradient_accumulation_steps=accumulation,
        loss_scale=LossScale(init_scale=4.0, min_scale=1.0),
        max_consecutive_skips=3,
        schedulers=[scheduler],
    )
    for scale_after in (2.0, 1.0):
        assert run_micro_steps(opt, w, [INF] * accumulation).skipped
        assert opt.loss_scale.scale == scale_after
    with pytest.raises(NonFiniteGradientError, match=r"3 skips.*parameter 0") as caught:
        run_micro_steps(opt, w, [INF] * accumulation)
    assert caught.value.parameters == ["group 0, parameter 0"]
    assert opt.loss_scale.scale == 1.0
    assert (opt.clock.update_step, opt.clock.skipped_updates) == (0, 3)
    assert scheduler.last_epoch == 0
    assert w.item() == 1.0


def test_an_update_sets_the_count_of_skips_in_a_row_back():
    w = parameter(1.0)
    opt = clocked_sgd(w, max_consecutive_skips=3)
    for _ in range(4):
        run_micro_steps(opt, w, [NAN, NAN, 1])
    assert (opt.clock.update_step, opt.clock.skipped_updates) == (4, 8)


def test_a_limit_of_one_raises_at_the_first_skip():
    w = parameter(1.0)
    opt = clocked_sgd(w, max_consecutive_skips=1)
    with pytest.raises(NonFiniteGradientError):
        run_micro_steps(opt, w, [NAN])
    assert opt.clock.skipped_updates == 1
    assert run_micro_steps(opt, w, [1]).updated


def test_the_floor_holds_where_backing_off_would_pass_it():
    w = parameter(1.0)
    opt = clocked_sgd(w, loss_scale=LossScale(init_scale=5.0, backoff_factor=0.3, min_scale=1.0))
    scales = []
    for _ in range(3):
        run_micro_steps(opt, w, [INF])
        scales.append(opt.loss_scale.scale)
    assert scales == [1.5, 1.0, 1.0]
