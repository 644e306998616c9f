"""Sections 2 and 6 of the design: StepInfo, StepClock, LossScale and settings."""

import math
import runpy
import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest
import torch
from helpers import (
    assert_close,
    clip_factor,
    clocked_sgd,
    counters,
    each_optimizer,
    given,
    parameter,
    run_micro_steps,
)
from torch.optim.lr_scheduler import StepLR

from stepclock_ext import ClockedOptimizer, LossScale, StepClock, StepInfo

INF, NAN = math.inf, math.nan

# StepInfo.


def test_inside_a_window_a_step_reports_neither_an_update_nor_numbers():
    w = parameter(1.0)
    opt = clocked_sgd(w, gradient_accumulation_steps=2, loss_scale=4.0)
    info = run_micro_steps(opt, w, [1])
    assert (info.updated, info.skipped) == (False, False)
    assert (info.loss, info.grad_norm, info.clipped_norm) == (None, None, None)
    assert (info.lr, info.loss_scale) == ((1.0,), 4.0)
    assert (info.micro_step, info.update_step) == (1, 0)


def test_an_update_reports_what_it_used():
    p, q = parameter(2.0), parameter(1.0)
    inner = torch.optim.SGD([{"params": [p]}, {"params": [q], "lr": 0.5}], lr=1.0)
    scheduler = StepLR(inner, step_size=1, gamma=0.1)
    opt = ClockedOptimizer(
        inner, gradient_accumulation_steps=2, max_grad_norm=1.0, schedulers=[scheduler]
    )
    opt.backward(6 * p, weight=1)
    opt.step()
    opt.backward(2 * p, weight=3)
    assert opt.step() == StepInfo(
        updated=True,
        skipped=False,
        loss=(1 * 12.0 + 3 * 4.0) / 4,
        grad_norm=3.0,
        clipped_norm=pytest.approx(3.0 * clip_factor(3.0, 1.0)),
        lr=(1.0, 0.5),
        loss_scale=None,
        micro_step=2,
        update_step=1,
    )
    assert [group["lr"] for group in opt.param_groups] == pytest.approx([0.1, 0.05])


@pytest.mark.parametrize("bad", [INF, NAN])
def test_a_skip_reports_what_was_found(bad):
    w = parameter(1.0)
    opt = clocked_sgd(w, loss_scale=LossScale(init_scale=4.0), max_grad_norm=1.0)
    info = run_micro_steps(opt, w, [bad])
    assert (info.updated, info.skipped) == (False, True)
    assert not math.isfinite(info.loss)
    assert not math.isfinite(info.grad_norm)
    assert (info.micro_step, info.update_step, info.loss_scale) == (1, 0, 4.0)


def test_a_finite_loss_with_an_infinite_gradient_is_reported_as_it_was():
    w = parameter(1.0)
    opt = clocked_sgd(w)
    opt.backward(given((w, INF)) + 3.0)
    info = opt.step()
    assert (info.loss, info.grad_norm) == (3.0, INF)


def test_the_reported_scale_is_the_one_the_window_was_seeded_with():
    w = parameter(1.0)
    scale = LossScale(init_scale=4.0, growth_interval=1)
    opt = clocked_sgd(w, loss_scale=scale)
    infos = [run_micro_steps(opt, w, [c]) for c in (1, NAN, 1)]
    assert [info.loss_scale for info in infos] == [4.0, 8.0, 4.0]
    assert opt.loss_scale == LossScale(init_scale=4.0, growth_interval=1, scale=8.0)


@pytest.mark.parametrize("loss_scale", [None, 4.0])
def test_a_scale_that_is_not_dynamic_stays_what_it_was(loss_scale):
    w = parameter(1.0)
    opt = clocked_sgd(w, loss_scale=loss_scale)
    run_micro_steps(opt, w, [1, NAN, 1])
    assert opt.loss_scale == loss_scale


@each_optimizer
def test_after_an_update_no_parameter_holds_a_gradient(make_optimizer):
    p, q = parameter(1.0), parameter(1.0)
    opt = ClockedOptimizer(make_optimizer([p, q]), max_grad_norm=1.0)
    opt.backward(3 * p + 4 * q)
    opt.step()
    assert (p.grad, q.grad) == (None, None)


# Settings.


def test_a_new_accumulation_takes_effect_at_the_next_window():
    w = parameter(0.0)
    opt = clocked_sgd(w, gradient_accumulation_steps=3)
    run_micro_steps(opt, w, [1])
    opt.gradient_accumulation_steps = 2
    assert opt.gradient_accumulation_steps == 3
    assert not run_micro_steps(opt, w, [1]).updated
    assert run_micro_steps(opt, w, [4]).updated
    assert opt.gradient_accumulation_steps == 2
    assert run_micro_steps(opt, w, [1, 3]).updated
    assert_close(w, -4.0)


@pytest.mark.parametrize("size", [(), (70_001,)])
def test_between_windows_a_new_accumulation_is_in_force_at_once(size):
    w = torch.nn.Parameter(torch.zeros(size))
    opt = clocked_sgd(w)
    for accumulation in (3, 1, 2):
        opt.gradient_accumulation_steps = accumulation
        assert opt.gradient_accumulation_steps == accumulation
        for micro in range(accumulation):
            opt.backward((micro + 1) * w.sum())
            info = opt.step()
        assert info.updated
    assert_close(w, torch.full(size, -(2.0 + 1.0 + 1.5)))


def test_attached_schedulers_walk_and_those_of_other_optimizers_are_refused():
    w = parameter(1.0)
    opt = clocked_sgd(w)
    scheduler = StepLR(opt.optimizers[0], step_size=1)
    opt.attach(scheduler)
    run_micro_steps(opt, w, [1, 1])
    assert scheduler.last_epoch == 2
    stranger = StepLR(torch.optim.SGD([parameter(1.0)], lr=1.0), step_size=1)
    with pytest.raises(ValueError, match="StepLR"):
        opt.attach(stranger)
    with pytest.raises(TypeError, match="scheduler"):
        opt.attach("cosine")


# The clock.


@pytest.mark.parametrize("size", [(), (70_001,)])
@pytest.mark.parametrize("pending", [False, True])
def test_discard_takes_everything_back_to_the_start_of_the_window(size, pending):
    w = torch.nn.Parameter(torch.zeros(size))
    opt = clocked_sgd(w, gradient_accumulation_steps=3)
    run_micro_steps(opt, w, [1] * 4, weights=[5] * 4)
    opt.discard()
    before, at = counters(opt.clock), w.detach().clone()
    assert (before["micro_step"], before["micro_step_in_epoch"], before["weight_seen"]) == (
        3,
        3,
        15,
    )
    run_micro_steps(opt, w, [1000, 1000], weights=[7, 7])
    if pending:
        opt.backward(1000 * w.sum())
    opt.discard()
    assert counters(opt.clock) == before
    for c in (1, 2, 6):
        opt.backward(c * w.sum())
        opt.step()
    assert_close(w, at.double() - 3.0)


def test_discard_between_windows_changes_nothing():
    w = parameter(1.0)
    opt = clocked_sgd(w, gradient_accumulation_steps=2)
    run_micro_steps(opt, w, [1, 1])
    before = counters(opt.clock)
    opt.discard()
    assert counters(opt.clock) == before


def test_a_dropped_tail_counts_as_micro_steps_and_not_as_weight():
    w = parameter(1.0)
    opt = clocked_sgd(w, gradient_accumulation_steps=4, tail="drop")
    run_micro_steps(opt, w, [1] * 6, weights=[10] * 6)
    opt.end_epoch()
    assert counters(opt.clock) == {
        "micro_step": 6,
        "update_step": 1,
        "skipped_updates": 0,
        "epoch": 1,
        "micro_step_in_epoch": 0,
        "weight_seen": 40,
    }


def test_a_skipped_window_counts_as_micro_steps_and_as_weight():
    w = parameter(1.0)
    opt = clocked_sgd(w, gradient_accumulation_steps=2)
    run_micro_steps(opt, w, [1, NAN, 1, 1], weights=[10] * 4)
    assert counters(opt.clock) == {
        "micro_step": 4,
        "update_step": 1,
        "skipped_updates": 1,
        "epoch": 0,
        "micro_step_in_epoch": 4,
        "weight_seen": 40,
    }


def test_the_clock_is_pure_python():
    code = "import runpy, sys; sys.modules['torch'] = None; runpy.run_path(sys.argv[1])"
    for module in (StepClock, LossScale):
        path = sys.modules[module.__module__].__file__
        subprocess.run([sys.executable, "-c", code, path], check=True)
        assert module.__name__ in runpy.run_path(path)


def test_the_state_of_a_clock_is_a_copy():
    clock, other = StepClock(), StepClock()
    clock.tick_micro()
    clock.tick_update()
    assert clock.due("eval", every=1)
    state = clock.state_dict()
    other.load_state_dict(state)
    other.tick_micro()
    other.tick_update()
    assert other.due("eval", every=1)
    assert clock.state_dict() == state
    assert counters(other)["update_step"] == 2


# LossScale.


def test_a_loss_scale_is_a_frozen_value_that_grows_and_backs_off():
    scale = LossScale(init_scale=8.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=2)
    assert scale.scale == 8.0
    once = scale.after(True)
    assert (once.scale, once.good_steps) == (8.0, 1)
    twice = once.after(True)
    assert (twice.scale, twice.good_steps) == (32.0, 0)
    assert (once.after(False).scale, once.after(False).good_steps) == (2.0, 0)
    assert twice.after(False).after(False).after(False).scale == 1.0
    assert (scale.scale, scale.good_steps) == (8.0, 0)
    with pytest.raises(FrozenInstanceError):
        scale.scale = 1.0


def test_the_defaults_of_a_loss_scale_are_those_of_torch():
    scaler, scale = torch.amp.GradScaler("cpu"), LossScale()
    assert scale.scale == scaler.get_scale() == 65536.0
    assert scale.growth_factor == scaler.get_growth_factor()
    assert scale.backoff_factor == scaler.get_backoff_factor()
    assert scale.growth_interval == scaler.get_growth_interval()
    assert scale.min_scale == 1.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("init_scale", 0.0),
        ("init_scale", NAN),
        ("growth_factor", 0.5),
        ("backoff_factor", 1.0),
        ("backoff_factor", 0.0),
        ("growth_interval", 0),
        ("min_scale", -1.0),
    ],
)
def test_a_loss_scale_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        LossScale(**{name: value})
