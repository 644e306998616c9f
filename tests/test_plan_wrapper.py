"""A wrapper with a plan: its window, its schedule, its horizon, its epochs."""

import pytest
import torch
from helpers import parameter
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from stepclock_ext import ClockedOptimizer, TrainPlan


def plan(**changes):
    given = {
        "dataset_size": 400,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 4,
        "num_train_epochs": 1,
        "learning_rate": 0.1,
    }
    return TrainPlan(**{**given, **changes})


def sgd(w, lr=0.1):
    return torch.optim.SGD([w], lr=lr)


def test_a_scheduler_built_in_micro_steps_is_refused_before_the_first_update():
    inner = sgd(parameter(1.0))
    with pytest.raises(ValueError, match="100 updates, got 400"):
        ClockedOptimizer(inner, plan=plan(), schedulers=[CosineAnnealingLR(inner, T_max=400)])


def test_a_scheduler_of_the_plans_horizon_passes_and_ends_at_zero():
    w = parameter(1.0)
    inner = sgd(w)
    cosine = CosineAnnealingLR(inner, T_max=100)
    opt = ClockedOptimizer(inner, plan=plan(), schedulers=[cosine])
    for _ in range(400):
        opt.backward(w)
        opt.step()
    assert opt.clock.update_step == 100
    assert inner.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-15)


def test_the_plans_own_schedule_is_made_attached_and_used_update_by_update():
    w = parameter(1.0)
    run = plan(warmup_ratio=0.1, min_lr=0.01)
    opt = ClockedOptimizer(sgd(w), plan=run)
    rates = []
    for _ in range(400):
        opt.backward(w)
        info = opt.step()
        if info.updated:
            rates += info.lr
    assert rates == [run.lr_at(update) for update in range(1, 101)]
    assert rates[9] == 0.1 and rates[99] == 0.01


def test_window_length_and_tail_are_the_plans():
    opt = ClockedOptimizer(sgd(parameter(1.0)), plan=plan(tail="drop"))
    assert (opt.gradient_accumulation_steps, opt.tail) == (4, "drop")


@pytest.mark.parametrize("changes", [{"gradient_accumulation_steps": 8}, {"tail": "carry"}])
def test_an_argument_that_contradicts_the_plan_is_refused(changes):
    with pytest.raises(ValueError, match=f"{next(iter(changes))} must be the plan's"):
        ClockedOptimizer(sgd(parameter(1.0)), plan=plan(), **changes)


def test_another_window_length_in_the_middle_of_a_plan_is_refused():
    opt = ClockedOptimizer(sgd(parameter(1.0)), plan=plan())
    with pytest.raises(ValueError, match="must be the plan's 4, got 8"):
        opt.gradient_accumulation_steps = 8


def test_what_is_no_plan_is_refused():
    with pytest.raises(TypeError, match="plan must be a TrainPlan"):
        ClockedOptimizer(sgd(parameter(1.0)), plan={"max_steps": 3})


def test_half_an_epoch_of_three_updates_is_due_after_the_second_and_the_third():
    w = parameter(1.0)
    opt = ClockedOptimizer(sgd(w), plan=plan(dataset_size=10, num_train_epochs=2))
    fired = []
    for _ in range(2):
        for _ in range(10):
            opt.backward(w)
            opt.step()
            if opt.clock.due("eval", every_epochs=0.5):
                fired.append(opt.clock.update_step)
        opt.end_epoch()
        if opt.clock.due("eval", every_epochs=0.5):
            fired.append(opt.clock.update_step)
    assert fired == [2, 3, 5, 6]


def test_a_group_added_later_follows_the_plan_at_its_own_base_rate():
    w, q = parameter(1.0), parameter(1.0)
    run = plan(dataset_size=40)
    opt = ClockedOptimizer(sgd(w), plan=run)
    for _ in range(8):
        opt.backward(w)
        opt.step()
    opt.add_param_group({"params": [q], "lr": 0.01})
    for _ in range(4):
        opt.backward(w + q)
        info = opt.step()
    assert info.lr == pytest.approx((run.lr_at(3), run.lr_at(3) / 10))


def test_a_group_added_to_the_first_of_two_optimizers_keeps_everybodys_rate():
    w, q, late = parameter(1.0), parameter(1.0), parameter(1.0)
    opt = ClockedOptimizer([sgd(w, 0.1), sgd(q, 0.2)])
    opt.attach(LambdaLR(opt, [lambda t: 1 / (1 + t), lambda t: 1.0]))
    opt.backward(w + q)
    opt.step()
    opt.add_param_group({"params": [late], "lr": 0.01})
    opt.backward(w + q + late)
    assert opt.step().lr == pytest.approx((0.05, 0.005, 0.2))
    assert [g["lr"] for g in opt.param_groups] == pytest.approx([0.1 / 3, 0.01 / 3, 0.2])
