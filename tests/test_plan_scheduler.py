"""A plan's torch scheduler: the planned rates, group by group, saved and loaded as any other."""

import copy
import warnings

import pytest
import torch
from helpers import clocked_sgd, parameter, run_micro_steps
from plans import micro_plan, plan
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
)

from stepclock_ext import ClockedOptimizer
from stepclock_ext.horizon import declared_horizon
from stepclock_ext.schedules import KINDS


def short_plan(**changes):
    """Ten updates: two of warm-up, landing at 1e-4."""
    return plan(**{"max_steps": 10, "warmup_steps": 2, "min_lr": 1e-4, **changes})


def sgd(*rates):
    groups = [{"params": [parameter(1.0)], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups, lr=1.0)


def rates_of(optimizer, scheduler, updates):
    """The rates of the groups in each update of a plain loop."""
    rates = []
    for _ in range(updates):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_loop_uses_the_planned_rate_in_each_update(kind):
    run = short_plan(lr_scheduler_type=kind)
    optimizer = sgd(1e-3)
    scheduler = run.make_scheduler(optimizer)
    assert isinstance(scheduler, LRScheduler)
    expected = [[run.lr_at(update)] for update in range(1, 11)]
    assert rates_of(optimizer, scheduler, 10) == expected


def test_other_groups_follow_at_their_own_base_rate():
    run = short_plan()
    optimizer = sgd(1e-3, 1e-2, 0.0)
    rates = rates_of(optimizer, run.make_scheduler(optimizer), 10)
    for update, (own, tenfold, frozen) in enumerate(rates, 1):
        assert own == run.lr_at(update)
        assert tenfold == pytest.approx(10 * own, rel=1e-12)
        assert frozen == 0.0


def test_the_plans_rate_must_be_the_base_rate_of_a_group():
    optimizer = sgd(3e-4, 1e-2)
    with pytest.raises(ValueError, match=r"TrainPlan: learning_rate .* got 0.001 .*0.0003, 0.01"):
        short_plan().make_scheduler(optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [3e-4, 1e-2]
    assert "initial_lr" not in optimizer.param_groups[0]


def test_past_the_end_the_rate_stays_with_one_warning():
    run = short_plan()
    optimizer = sgd(1e-3)
    scheduler = run.make_scheduler(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the last planned update is no reason to warn
        rates_of(optimizer, scheduler, 10)
    with pytest.warns(UserWarning, match="10 updates were planned and update 11 is done") as caught:
        rates = rates_of(optimizer, scheduler, 5)
    assert rates == [[1e-4]] * 5
    assert len(caught) == 1


@pytest.mark.parametrize("stop", [0, 1, 2, 7, 10])
def test_resuming_gives_the_rates_of_the_unbroken_run(stop):
    run = short_plan()
    optimizer = sgd(1e-3, 1e-2)
    scheduler = run.make_scheduler(optimizer)
    unbroken = rates_of(optimizer, scheduler, stop)
    state = copy.deepcopy(scheduler.state_dict())
    resumed = sgd(1e-3, 1e-2)
    again = run.make_scheduler(resumed)
    again.load_state_dict(state)
    assert again.get_last_lr() == [group["lr"] for group in resumed.param_groups]
    assert again.last_epoch == stop
    unbroken += rates_of(optimizer, scheduler, 10 - stop)
    assert unbroken[stop:] == rates_of(resumed, again, 10 - stop)


def test_loading_does_not_bring_the_saved_base_rate_back():
    old = short_plan(learning_rate=0.02)
    optimizer = sgd(0.02)
    scheduler = old.make_scheduler(optimizer)
    rates_of(optimizer, scheduler, 4)
    new = short_plan(learning_rate=0.04)
    resumed = sgd(0.04)
    again = new.make_scheduler(resumed)
    resumed.load_state_dict(optimizer.state_dict())
    again.load_state_dict(scheduler.state_dict())
    assert rates_of(resumed, again, 2) == [[new.lr_at(5)], [new.lr_at(6)]]


def test_a_saved_state_is_plain_values():
    state = short_plan().make_scheduler(sgd(1e-3, 1e-2)).state_dict()
    assert {"optimizer", "curve", "base_lrs"}.isdisjoint(state)
    for value in state.values():
        items = value if isinstance(value, list) else [value]
        assert all(isinstance(item, (bool, int, float)) for item in items)


def test_a_rate_in_a_tensor_is_written_in_place():
    run = short_plan()
    rate = torch.tensor(1e-3)
    optimizer = torch.optim.SGD([parameter(1.0)], lr=rate)
    held = optimizer.param_groups[0]["lr"]
    scheduler = run.make_scheduler(optimizer)
    for update in range(1, 11):
        assert held == torch.tensor(run.lr_at(update))
        optimizer.step()
        scheduler.step()
    scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": 4})
    assert held is optimizer.param_groups[0]["lr"]
    assert held == torch.tensor(run.lr_at(5))


def test_a_group_that_is_added_takes_part_from_the_next_update_on():
    run = short_plan()
    optimizer = sgd(1e-3)
    scheduler = run.make_scheduler(optimizer)
    rates_of(optimizer, scheduler, 4)
    optimizer.add_param_group({"params": [parameter(1.0)], "lr": 2e-3})
    rates_of(optimizer, scheduler, 1)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(
        [run.lr_at(6), 2 * run.lr_at(6)]
    )


# Under the wrapper.


@pytest.mark.parametrize("built_on", ["inner", "wrapper"])
def test_a_skipped_update_moves_no_rate(built_on):
    run = micro_plan(20, 2, warmup_steps=2, num_train_epochs=1)
    w = parameter(1.0)
    opt = clocked_sgd(w, lr=1e-3, gradient_accumulation_steps=2)
    owner = opt if built_on == "wrapper" else opt.optimizers[0]
    opt.attach(run.make_scheduler(owner))
    used = []
    for window in range(12):
        slope = float("inf") if window in (0, 5) else 1.0
        info = run_micro_steps(opt, w, [slope, 1.0])
        used += [info.lr[0]] if info.updated else []
    assert used == [run.lr_at(update) for update in range(1, 11)]


def test_several_optimizers_share_one_plan():
    run = short_plan()
    inner = [sgd(1e-3), sgd(1e-2)]
    opt = ClockedOptimizer(inner)
    opt.attach(run.make_scheduler(opt))
    w = inner[0].param_groups[0]["params"][0]
    rates = [run_micro_steps(opt, w, [1.0]).lr for _ in range(10)]
    assert [own for own, _ in rates] == [run.lr_at(update) for update in range(1, 11)]
    assert rates[-1] == pytest.approx((1e-4, 1e-3))


def test_a_wrapper_with_a_plans_scheduler_can_be_copied_and_resumed():
    run = short_plan()
    w = parameter(1.0)
    opt = clocked_sgd(w, lr=1e-3)
    opt.attach(run.make_scheduler(opt))
    run_micro_steps(opt, w, [1.0] * 4)
    twin_w, twin = copy.deepcopy((w, opt))
    assert run_micro_steps(twin, twin_w, [1.0]).lr == (run.lr_at(5),)
    other_w = parameter(1.0)
    other = clocked_sgd(other_w, lr=1e-3)
    other.attach(run.make_scheduler(other))
    other.load_state_dict(opt.state_dict())
    assert run_micro_steps(other, other_w, [1.0]).lr == (run.lr_at(5),)
    assert run_micro_steps(opt, w, [1.0]).lr == (run.lr_at(5),)


# 10: what other schedulers declare.


def transformers_lambda(optimizer):
    """As ``get_linear_schedule_with_warmup`` builds it."""
    from functools import partial

    def factor(step, *, num_warmup_steps, num_training_steps):
        return 1.0 - step / num_training_steps

    return LambdaLR(optimizer, partial(factor, num_warmup_steps=0, num_training_steps=400))


HORIZONS = {
    "plan": (lambda o: short_plan().make_scheduler(o), 10),
    "cosine": (lambda o: CosineAnnealingLR(o, T_max=400), 400),
    "one cycle": (lambda o: OneCycleLR(o, max_lr=1.0, total_steps=9, cycle_momentum=False), 9),
    "one cycle by epochs": (
        lambda o: OneCycleLR(o, 1.0, epochs=3, steps_per_epoch=5, cycle_momentum=False),
        15,
    ),
    "polynomial": (lambda o: PolynomialLR(o, total_iters=30), 30),
    "transformers": (transformers_lambda, 400),
    "warm-up, then cosine": (
        lambda o: SequentialLR(
            o, [LinearLR(o, total_iters=10), CosineAnnealingLR(o, T_max=90)], milestones=[10]
        ),
        100,
    ),
    "open end": (
        lambda o: SequentialLR(o, [LinearLR(o), ExponentialLR(o, gamma=0.9)], milestones=[5]),
        None,
    ),
    "chain": (
        lambda o: ChainedScheduler([ConstantLR(o), CosineAnnealingLR(o, T_max=50)], optimizer=o),
        50,
    ),
    "exponential": (lambda o: ExponentialLR(o, gamma=0.9), None),
    "lambda": (lambda o: LambdaLR(o, lambda t: 1.0), None),
    "warm-up": (lambda o: LinearLR(o, total_iters=10), None),
}


@pytest.mark.parametrize("build, horizon", HORIZONS.values(), ids=HORIZONS)
def test_a_scheduler_declares_its_horizon_or_none(build, horizon):
    assert declared_horizon(build(sgd(1e-3))) == horizon


def test_a_horizon_in_micro_steps_would_end_far_above_zero():
    run = micro_plan(400, 4, num_train_epochs=1)
    for horizon, end in ((400, 0.853553), (run.total_updates, 0.0)):
        optimizer = sgd(1.0)
        scheduler = CosineAnnealingLR(optimizer, T_max=horizon)
        rates_of(optimizer, scheduler, run.total_updates)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(end, abs=1e-6)
