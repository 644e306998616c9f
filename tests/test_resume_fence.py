"""A wrapper loads a state of another plan: refused, or remapped with a rate that goes on."""

import copy

import pytest
import torch
from helpers import parameter
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from stepclock_ext import ClockedOptimizer, ScheduleMismatchError, TrainPlan


def plan(steps=4, **changes):
    given = {
        "dataset_size": 400,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": steps,
        "num_train_epochs": 1,
        "learning_rate": 0.1,
        "min_lr": 0.001,
    }
    return TrainPlan(**{**given, **changes})


def wrapper(run=None, lr=0.1, **settings):
    w = parameter(1.0)
    return w, ClockedOptimizer(torch.optim.SGD([w], lr=lr), plan=run, **settings)


def train(w, opt, micro_steps):
    """The rate of each update, and the gradient is nothing."""
    rates = []
    for _ in range(micro_steps):
        opt.backward(0 * w)
        info = opt.step()
        rates += list(info.lr) if info.updated else []
    return rates


def saved_at(update, run):
    w, opt = wrapper(run)
    rates = train(w, opt, run.gradient_accumulation_steps * update)
    return opt.state_dict(), rates


def test_another_accumulation_factor_is_refused_and_nothing_changes():
    state, _ = saved_at(50, plan(4))
    _, opt = wrapper(plan(8))
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises(ScheduleMismatchError, match="gradient_accumulation_steps") as caught:
        opt.load_state_dict(state)
    report = caught.value.report
    assert report.differences["gradient_accumulation_steps"] == (4, 8)
    assert (report.remaining_updates, report.total_updates) == (25, 75)
    assert opt.state_dict()["stepclock"] == before["stepclock"]


def test_the_same_plan_goes_on():
    state, rates = saved_at(50, plan(4))
    w, opt = wrapper(plan(4))
    opt.load_state_dict(state)
    assert rates + train(w, opt, 200) == [plan(4).lr_at(u) for u in range(1, 101)]


@pytest.mark.parametrize("how", ["by_samples", "by_progress", "keep_lr"])
@pytest.mark.parametrize(("steps", "left"), [(8, 25), (2, 100), (1, 200)])
def test_after_a_remap_the_rate_goes_on_and_lands_on_the_new_last_update(how, steps, left):
    state, rates = saved_at(50, plan(4))
    w, opt = wrapper(plan(steps))
    opt.load_state_dict(state, remap=how)
    assert opt.plan.total_updates == 50 + left
    after = train(w, opt, 200)
    assert len(after) == left
    assert after[-1] == 0.001
    assert all(now < before for before, now in zip([rates[-1], *after], after, strict=False))
    assert after[0] > rates[-1] - 2 * steps / 4 * (rates[-2] - rates[-1])


def test_hold_stays_at_the_rate_that_the_last_update_used():
    state, rates = saved_at(50, plan(4))
    w, opt = wrapper(plan(8))
    opt.load_state_dict(state, remap="hold")
    assert train(w, opt, 80) == [rates[-1]] * 10


def test_as_is_goes_on_with_the_saved_counters():
    state, _ = saved_at(20, plan(4))
    w, opt = wrapper(plan(8))
    opt.load_state_dict(state, remap="as_is")
    assert opt.clock.update_step == 20
    assert train(w, opt, 8) == [plan(8).lr_at(21)]


def test_a_remapped_run_saves_and_resumes_itself():
    state, _ = saved_at(50, plan(4))
    w, opt = wrapper(plan(8))
    opt.load_state_dict(state, remap="by_samples")
    train(w, opt, 80)
    saved = opt.state_dict()
    rest = train(w, opt, 120)
    w, again = wrapper(plan(8))
    again.load_state_dict(saved)
    assert again.plan.total_updates == 75
    assert train(w, again, 120) == rest


@pytest.mark.parametrize(("rule", "factor"), [("linear", 2.0), ("sqrt", 2**0.5), (None, 1.0)])
def test_twice_the_world_scales_the_rate_by_the_rule_that_was_asked_for(rule, factor):
    def run(world_size):
        return plan(
            1,
            dataset_size=800,
            per_device_train_batch_size=10,
            world_size=world_size,
            num_train_epochs=3,
            learning_rate=0.02,
            lr_scheduler_type="constant",
            min_lr=0.0,
        )

    w, opt = wrapper(run(2), lr=0.02)
    assert train(w, opt, 40) == [0.02] * 40
    opt.end_epoch()
    state = opt.state_dict()
    w, opt = wrapper(run(4), lr=0.02)
    with pytest.raises(ScheduleMismatchError, match="world_size"):
        opt.load_state_dict(state)
    opt.load_state_dict(state, remap="by_progress", lr_scaling=rule)
    assert opt.plan.total_updates == 40 + 2 * 20
    assert train(w, opt, 20) == pytest.approx([0.02 * factor] * 20, rel=1e-6)


@pytest.mark.parametrize(
    "changes",
    [{"gradient_accumulation_steps": 8}, {"tail": "drop"}, {"max_grad_norm": 1.0}],
)
def test_settings_are_compared_without_a_plan(changes):
    w, opt = wrapper(gradient_accumulation_steps=4)
    train(w, opt, 4)
    settings = {"gradient_accumulation_steps": 4, **changes}
    w, other = wrapper(**settings)
    with pytest.raises(ScheduleMismatchError, match=next(iter(changes))):
        other.load_state_dict(opt.state_dict())
    other.load_state_dict(opt.state_dict(), remap="as_is")
    assert other.clock.update_step == 1


def test_a_users_scheduler_needs_a_factory_and_is_moved_through_the_updates_done():
    def cosine(opt):
        return CosineAnnealingLR(opt, T_max=opt.plan.total_updates)

    def build(steps):
        w = parameter(1.0)
        inner = torch.optim.SGD([w], lr=0.1)
        run = plan(steps, min_lr=0.0)
        scheduler = CosineAnnealingLR(inner, T_max=run.total_updates)
        return w, ClockedOptimizer(inner, plan=run, schedulers=[scheduler])

    w, opt = build(4)
    train(w, opt, 200)
    state = opt.state_dict()
    w, opt = build(8)
    with pytest.raises(ValueError, match="scheduler_factory"):
        opt.load_state_dict(state, remap="by_progress")
    assert opt.clock.update_step == 0
    opt.load_state_dict(state, remap="by_progress", scheduler_factory=cosine)
    assert opt.plan.total_updates == 75
    reference = torch.optim.SGD([parameter(1.0)], lr=0.1)
    expected = CosineAnnealingLR(reference, T_max=75)
    reference.step()
    for _ in range(50):
        expected.step()
    assert opt.param_groups[0]["lr"] == pytest.approx(reference.param_groups[0]["lr"])
    after = train(w, opt, 200)
    assert len(after) == 25
    assert opt.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-12)


def test_hold_lets_go_of_a_users_scheduler():
    def build(steps):
        w = parameter(1.0)
        inner = torch.optim.SGD([w], lr=0.1)
        halving = LambdaLR(inner, lambda t: 0.5**t)
        return w, ClockedOptimizer(inner, gradient_accumulation_steps=steps, schedulers=[halving])

    w, opt = build(2)
    assert train(w, opt, 4) == [0.1, 0.05]
    w, other = build(4)
    other.load_state_dict(opt.state_dict(), remap="hold")
    assert train(w, other, 8) == [0.05, 0.05]


def test_an_open_window_is_kept_and_closed_by_its_own_weights():
    w, opt = wrapper(plan(4))
    opt.backward(10 * w)
    opt.step()
    state = opt.state_dict()
    w, other = wrapper(plan(2))
    other.load_state_dict(state, remap="by_samples")
    assert other.clock.micro_step_in_window == 1
    other.backward(2 * w)
    info = other.step()
    assert info.updated and info.grad_norm == pytest.approx(6.0)


def test_an_open_window_can_be_discarded_and_its_micro_steps_replayed():
    w, opt = wrapper(plan(4))
    train(w, opt, 6)
    state = opt.state_dict()
    _, other = wrapper(plan(4))
    other.load_state_dict(state)
    assert list(other.discard()) == [5, 6]
    assert (other.clock.micro_step, other.clock.micro_step_in_epoch) == (4, 4)
    assert list(other.discard()) == []


def test_a_bare_state_is_unknown_to_a_plan():
    w = parameter(1.0)
    bare = torch.optim.SGD([w], lr=0.1)
    _, opt = wrapper(plan(4))
    with pytest.raises(ScheduleMismatchError, match="unknown"):
        opt.load_state_dict(bare.state_dict())
    opt.load_state_dict(bare.state_dict(), remap="as_is")


def test_a_remap_that_does_not_exist_is_refused():
    state, _ = saved_at(1, plan(4))
    _, opt = wrapper(plan(4))
    with pytest.raises(ValueError, match="remap must be one of by_samples"):
        opt.load_state_dict(state, remap="by_magic")
