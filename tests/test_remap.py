"""Remapped curves: what each of them promises, in numbers."""

import json
from dataclasses import asdict

import pytest
import torch
from helpers import parameter
from plans import plan
from saved_runs import after, clock, rates, run, saved

from stepclock_ext.plan_scheduler import PlanScheduler
from stepclock_ext.remap import REMAPS, RemappedCurve, remap
from stepclock_ext.schedules import KINDS, LANDING_KINDS, Schedule

close = pytest.approx


def line(micro_steps, accumulation=1, **changes):
    return run(micro_steps, accumulation, **{"lr_scheduler_type": "linear", **changes})


# By samples and by progress.


@pytest.mark.parametrize("kind", LANDING_KINDS)
@pytest.mark.parametrize("done", [20, 80, 160])
def test_by_samples_the_rate_of_a_sample_stays(kind, done):
    shape = {"lr_scheduler_type": kind, "warmup_steps": 40}
    old = run(800, 4, **shape)
    curve = after(old, done, run(800, 8, **shape), "by_samples")
    assert curve.total_updates == done + (200 - done) // 2
    for update in range(done + 1, curve.total_updates + 1):
        assert curve.lr_at(update) == close(old.lr_at(done + 2 * (update - done)), rel=1e-12)
    assert curve.lr_at(curve.total_updates) == 0.1


def test_by_samples_windows_and_tails_fall_on_their_own_samples():
    old, new = line(7, 2, num_train_epochs=2), line(7, 4, num_train_epochs=2)
    curve = after(old, clock(0), new, "by_samples")
    assert rates(curve, 1, 4) == close([old.lr_at(update) for update in (2, 4, 6, 8)], rel=1e-12)
    by_progress = after(old, clock(0), new, "by_progress")
    assert rates(by_progress, 1, 4) == close(rates(curve, 1, 4), rel=1e-12)
    old = line(7, 3, num_train_epochs=2)  # windows 3, 3, 1 beside 4, 3
    curve = after(old, clock(0), new, "by_samples")
    expected = [old.schedule.lr_at_position(place) for place in (4 / 3, 3, 3 + 4 / 3, 6)]
    assert rates(curve, 1, 4) == close(expected, rel=1e-12)


def test_by_samples_counts_from_the_middle_of_an_epoch():
    old, new = line(12, 2, num_train_epochs=2), line(12, 4, num_train_epochs=2)
    curve = after(old, clock(3, 0, 6), new, "by_samples")
    # six samples are left in the epoch: windows 4, 2, then 4, 4, 4
    places = [5, 6, 8, 10, 12]
    assert rates(curve, 4, 8) == close([old.lr_at(place) for place in places], rel=1e-12)


def test_by_samples_an_open_window_counts_from_where_it_began():
    old, new = line(40, 4), line(40, 8)
    curve = after(old, clock(2, 0, 11, 3), new, "by_samples")
    assert rates(curve, 2, 6) == close([old.lr_at(u) for u in (2, 4, 6, 8, 10)], rel=1e-12)


def test_by_samples_a_skipped_update_leaves_no_jump():
    old, new = line(40, 2), line(40, 4)
    curve = after(old, clock(9, 0, 20), new, "by_samples")  # ten windows, one skipped
    assert (curve.start, curve.total_updates) == (9, 14)
    assert curve.rest_at(9) == old.lr_at(9)
    assert rates(curve, 14, 15) == [0.1, 0.1]


def test_by_samples_needs_the_same_number_of_samples():
    with pytest.raises(ValueError, match=r"same number of samples .* got 800 .* 1600 now; use 'by"):
        after(line(800, 4), 20, line(1600, 4), "by_samples")
    old = run(None, 4, max_steps=100)
    with pytest.raises(ValueError, match=r"got 400 .* and 200 now; max_steps .* about 75"):
        after(old, 50, run(None, 8, max_steps=50), "by_samples")
    curve = after(old, 50, run(None, 8, max_steps=75), "by_samples")
    assert curve.lr_at(60) == close(old.lr_at(70), rel=1e-12)
    assert curve.lr_at(75) == 0.1


def test_by_progress_stretches_the_rest():
    old, new = line(100), line(100, 4)
    curve = after(old, 60, new, "by_progress")
    assert rates(curve, 60, 70) == close([old.lr_at(60 + 4 * n) for n in range(11)], rel=1e-12)
    longer = after(old, 60, line(100, num_train_epochs=2), "by_progress")
    assert longer.total_updates == 200
    assert longer.lr_at(130) == close(old.lr_at(80), rel=1e-12)


def test_a_warmup_that_is_not_over_goes_on():
    old = line(100, warmup_steps=40)
    curve = after(old, 20, line(100, 2, warmup_steps=40), "by_progress")
    assert (curve.warmup_updates, curve.total_updates) == (30, 60)
    assert rates(curve, 21, 30) == close([0.5 + 0.05 * n for n in range(1, 11)], rel=1e-12)
    done = after(old, 50, line(100, 2, warmup_steps=40), "by_progress")
    assert done.warmup_updates == 40


# From the current rate.


def test_keep_lr_falls_from_the_current_rate_in_the_plans_own_shape():
    old, new = run(100), line(100, 2, warmup_steps=10)
    curve = after(old, 50, new, "keep_lr")
    now = old.lr_at(50)
    expected = [0.1 + (now - 0.1) * (1 - n / 25) for n in range(26)]
    assert rates(curve, 50, 75) == close(expected, rel=1e-12)
    assert (curve.lr_at(75), curve.lr_at(76), curve.warmup_updates) == (0.1, 0.1, 0)


def test_hold_stays_and_says_that_it_does_not_land():
    done = remap(saved(run(100), 50), run(100, 2), "hold")
    assert rates(done.curve, 51, 80) == [run(100).lr_at(50)] * 30
    assert not done.curve.lands
    assert any("does not land" in note for note in done.notes)


@pytest.mark.parametrize("how", ["keep_lr", "hold"])
def test_before_the_first_update_the_current_rate_is_the_first_one(how):
    old = run(100, warmup_steps=10)
    assert after(old, 0, run(100, 2), how).rest_at(0) == old.lr_at(1) == 0.1


@pytest.mark.parametrize("how", REMAPS)
@pytest.mark.parametrize("kind", sorted(set(KINDS) - set(LANDING_KINDS)))
def test_a_schedule_that_does_not_land_says_so(how, kind):
    old, new = run(100, lr_scheduler_type=kind), run(100, 2, lr_scheduler_type=kind)
    done = remap(saved(old, 50), new, how)
    assert done.curve.rest_at(50) == old.lr_at(50)
    assert any("does not land" in note for note in done.notes)


# Nothing remains.


@pytest.mark.parametrize("how", ["by_progress", "keep_lr", "by_samples"])
def test_with_nothing_left_the_total_is_what_is_done(how):
    old = run(100)
    new = run(100, 2) if how == "by_samples" else run(20)
    done = remap(saved(old, clock(99, 1, 0) if how == "by_samples" else clock(50, 0, 50)), new, how)
    start = done.curve.start
    assert (done.total_updates, done.remaining_updates) == (start, 0)
    assert rates(done.curve, start + 1, start + 2) == [0.1, 0.1]
    assert any("nothing remains" in note for note in done.notes)


# The factor.


def case_24(world_size, **changes):
    return plan(
        **{
            "dataset_size": 800,
            "per_device_train_batch_size": 10,
            "gradient_accumulation_steps": 1,
            "world_size": world_size,
            "learning_rate": 0.02,
            "lr_scheduler_type": "constant",
            **changes,
        }
    )


@pytest.mark.parametrize("how", REMAPS)
@pytest.mark.parametrize(
    "lr_scaling, learning_rate, expected",
    [
        ("linear", 0.02, 0.04),
        ("sqrt", 0.02, 0.02 * 2**0.5),
        (None, 0.02, 0.02),
        (None, 0.04, 0.04),
    ],
)
def test_24_twice_the_ranks(how, lr_scaling, learning_rate, expected):
    old, new = case_24(2), case_24(4, learning_rate=learning_rate)
    assert (old.updates_per_epoch, new.updates_per_epoch) == (40, 20)
    done = remap(saved(old, clock(40, 1, 0)), new, how, lr_scaling=lr_scaling)
    assert (done.total_updates, done.remaining_updates) == (80, 40)
    assert done.curve.lr_at(41) == close(expected, rel=1e-12)
    assert done.curve.learning_rate == learning_rate
    assert done.factor == close(expected / 0.02)
    assert any("multiplied" in note for note in done.notes) == (expected != 0.02)


@pytest.mark.parametrize("how", REMAPS)
@pytest.mark.parametrize("done, warmup", [(30, 0.0), (30, 0.6)])
def test_the_factor_multiplies_the_rest_and_never_the_landing(how, done, warmup):
    old, new = line(100, warmup_ratio=warmup), line(100, 2, warmup_ratio=warmup)
    curve = after(old, done, new, how, lr_scaling="linear")
    assert curve.rest_at(done) == close(2 * old.lr_at(done), rel=1e-12)
    assert rates(curve, 1, done) == rates(old, 1, done)
    if how == "hold":
        return
    assert curve.lr_at(65) == 0.1
    if how != "keep_lr" and warmup:
        assert curve.lr_at(45) == max(rates(curve, 31, 65)) == close(2.0)
    assert curve.lr_at(64) < 0.5


def test_scaling_twice_is_refused():
    with pytest.raises(ValueError, match=r"lr_scaling must be None where learning_rate is changed"):
        after(line(100), 10, line(100, 2, learning_rate=2.0), "keep_lr", lr_scaling="linear")


def test_another_landing_is_where_the_rest_lands():
    curve = after(line(100), 50, line(100, 2, min_lr=0.2), "by_progress")
    assert curve.rest_at(50) == close(line(100).lr_at(50), rel=1e-12)
    assert curve.lr_at(75) == 0.2


def test_words_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match=r"remap: how must be one of by_samples, .* got 'as_was'"):
        after(line(100), 10, line(100), "as_was")
    with pytest.raises(ValueError, match=r"lr_scaling must be .* got 'cubic'"):
        after(line(100), 10, line(100), "hold", lr_scaling="cubic")


def test_without_a_saved_plan_or_clock_nothing_is_guessed():
    state = saved(line(100), 10)
    del state["stepclock"]["clock"]
    with pytest.raises(ValueError, match=r"must hold the plan and the clock .* without a clock"):
        remap(state, line(100), "hold")
    with pytest.raises(ValueError, match=r"got one without a plan; use 'as_is'"):
        remap({}, line(100), "hold")


# The place in the data.


@pytest.mark.parametrize(
    "at, batch, expected, again",
    [
        (clock(30, 1, 0), 20, (1, 0), 0),
        (clock(6, 0, 6), 20, (0, 3), 0),
        (clock(7, 0, 7), 20, (0, 3), 10),
        (clock(10, 0, 10), 30, (0, 4), 0),
    ],
)
def test_the_place_is_told_in_micro_steps_of_the_new_plan(at, batch, expected, again):
    sizes = {"dataset_size": 100, "gradient_accumulation_steps": 1, "world_size": 1}
    old = plan(**sizes, per_device_train_batch_size=10)
    new = plan(**sizes, per_device_train_batch_size=batch)
    done = remap(saved(old, at), new, "by_samples")
    assert (done.epoch, done.micro_step_in_epoch) == expected
    assert any(f"{again} samples are read again" in note for note in done.notes) == bool(again)


def test_a_dropped_tail_was_seen():
    old, new = line(7, 4, tail="drop", num_train_epochs=2), line(7, 2, num_train_epochs=2)
    done = remap(saved(old, clock(1, 0, 7, 3)), new, "by_samples")
    # the open window of three micro steps goes on: in windows of two it is one micro step short
    assert (done.epoch, done.micro_step_in_epoch, done.remaining_updates) == (0, 7, 5)
    assert remap(saved(old, clock(1, 1, 0)), new, "by_samples").remaining_updates == 4


# As a value and as a scheduler.


@pytest.mark.parametrize("how", REMAPS)
def test_a_curve_is_plain_values(how):
    old, middle, new = line(80, 2), line(80, 4), line(80, 2)
    first = after(old, 10, middle, how)
    curve = remap(saved(middle, clock(12, 0, 28), curve=first), new, how).curve
    again = RemappedCurve(**json.loads(json.dumps(asdict(curve))))
    assert again == curve
    assert rates(again, 1, 50) == rates(curve, 1, 50)
    assert isinstance(again.before.before, Schedule)


def test_a_curve_drives_a_torch_scheduler():
    curve = after(line(100), 50, line(100, 2), "by_samples")
    groups = [{"params": [parameter(1.0)], "lr": rate} for rate in (1.0, 0.1)]
    optimizer = torch.optim.SGD(groups)
    scheduler = PlanScheduler(optimizer, curve)
    for update in range(1, curve.total_updates + 1):
        own, tenth = (group["lr"] for group in optimizer.param_groups)
        assert own == curve.lr_at(update)
        assert tenth == close(own / 10, rel=1e-12)
        optimizer.step()
        scheduler.step()


def test_a_fraction_of_an_update_has_no_rate():
    curve = after(line(100), 50, line(100, 2), "keep_lr")
    with pytest.raises(ValueError, match="whole number"):
        curve.lr_at(60.5)
