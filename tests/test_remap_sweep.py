"""A sweep over plan changes: every remap goes on from the current rate and lands where it says."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plans import plan
from saved_runs import clock, positions, rates, run, saved

from stepclock_ext.remap import remap
from stepclock_ext.schedules import LANDING_KINDS

CONTINUOUS = ["by_samples", "by_progress", "keep_lr"]
EXACT = 1e-9  # relative; the rates are sums and products of a few doubles

sizes = st.fixed_dictionaries(
    {
        "per_device_train_batch_size": st.integers(1, 5),
        "gradient_accumulation_steps": st.integers(1, 9),
        "world_size": st.integers(1, 4),
        "tail": st.sampled_from(["flush", "carry", "drop"]),
        "dataloader_drop_last": st.booleans(),
        "sampler_drop_last": st.booleans(),
    }
)
shapes = st.fixed_dictionaries(
    {
        "lr_scheduler_type": st.sampled_from(LANDING_KINDS),
        "warmup_ratio": st.sampled_from([0.0, 0.1, 0.5, 0.9]),
        "min_lr": st.sampled_from([0.0, 1e-5, 1e-4]),
    }
)


def planned(**arguments):
    """The plan, or no example where such a run has no update."""
    try:
        return plan(**arguments)
    except ValueError:
        assume(False)


def is_close(rate, other):
    return abs(rate - other) <= EXACT * max(abs(rate), abs(other))


def check_rest(done, factor, min_lr, last_used):
    """The promises that hold for each remap, on the curve alone."""
    curve, start = done.curve, done.curve.start
    if curve.how != "hold":
        assert curve.lr_at(max(1, done.total_updates + 1)) == curve.lr_at(done.total_updates + 9)
    if done.remaining_updates == 0:
        return
    assert is_close(curve.rest_at(start), factor * last_used)
    if curve.lands:
        assert curve.lr_at(done.total_updates) == min_lr


@settings(max_examples=300, deadline=None)
@given(
    samples=st.integers(1, 120),
    epochs=st.integers(1, 3),
    shape=shapes,
    old=sizes,
    new=sizes,
    how=st.sampled_from(CONTINUOUS),
    data=st.data(),
)
def test_any_change_goes_on_and_lands(samples, epochs, shape, old, new, how, data):
    common = {"dataset_size": samples, "num_train_epochs": epochs, **shape}
    old, new = planned(**common, **old), planned(**common, **new)
    at = data.draw(st.sampled_from(list(positions(old))))
    done = remap(saved(old, at), new, how)
    assert done.total_updates == at["update_step"] + done.remaining_updates
    assume(at["update_step"] > 0)
    check_rest(done, 1.0, shape["min_lr"], old.lr_at(at["update_step"]))
    if old.schedule.lands:
        assert done.curve.lr_at(done.total_updates + 1) == shape["min_lr"]
    falls = rates(done.curve, max(at["update_step"], old.warmup_updates) + 1, done.total_updates)
    if how != "keep_lr" and at["update_step"] >= old.warmup_updates:
        assert falls == sorted(falls, reverse=True)


@settings(max_examples=200, deadline=None)
@given(
    samples=st.integers(1, 60),
    epochs=st.integers(1, 3),
    shape=shapes,
    plans=st.tuples(sizes, sizes, sizes),
    hows=st.tuples(st.sampled_from([*CONTINUOUS, "hold"]), st.sampled_from([*CONTINUOUS, "hold"])),
    scaling=st.sampled_from([None, "linear", "sqrt"]),
    data=st.data(),
)
def test_a_chain_of_two_goes_on_and_lands(samples, epochs, shape, plans, hows, scaling, data):
    common = {"dataset_size": samples, "num_train_epochs": epochs, **shape}
    first, second, third = (planned(**common, **each) for each in plans)
    at = data.draw(st.sampled_from(list(positions(first))))
    one = remap(saved(first, at), second, hows[0], lr_scaling=scaling)
    assume(one.remaining_updates > 1 and at["update_step"] > 0)
    on = data.draw(st.integers(1, one.remaining_updates - 1))
    later = clock(at["update_step"] + on, one.epoch, one.micro_step_in_epoch)
    two = remap(saved(second, later, curve=one.curve), third, hows[1])
    used = one.curve.lr_at(later["update_step"])
    check_rest(two, 1.0, shape["min_lr"], used)
    assert rates(two.curve, 1, later["update_step"]) == rates(one.curve, 1, later["update_step"])


@settings(max_examples=100, deadline=None)
@given(
    factor=st.sampled_from([0.25, 0.5, 2.0, 8.0]),
    low=st.sampled_from([0.0, 0.05]),
    shape=shapes,
    how=st.sampled_from([*CONTINUOUS, "hold"]),
    update=st.integers(1, 99),
)
def test_any_factor_multiplies_the_rest_and_never_the_landing(factor, low, shape, how, update):
    shape = {**shape, "min_lr": low}
    old = run(200, 2, **shape)
    done = remap(saved(old, update), run(200, 4, **shape, learning_rate=factor), how)
    assert done.factor == factor
    check_rest(done, factor, low, old.lr_at(update))


@pytest.mark.parametrize("kind", LANDING_KINDS)
@pytest.mark.parametrize("low, warmup", [(0.0, 0.0), (0.1, 0.2), (0.1, 0.8)])
def test_there_and_back_by_samples_is_the_first_plan_again(kind, low, warmup):
    shape = {"lr_scheduler_type": kind, "min_lr": low, "warmup_ratio": warmup}
    narrow, wide = run(800, 4, **shape), run(800, 8, **shape)
    there = remap(saved(narrow, 40), wide, "by_samples").curve
    back = remap(saved(wide, clock(60, 0, 320), curve=there), narrow, "by_samples")
    assert (back.total_updates, there.total_updates) == (180, 120)
    for update in range(60, 181):
        assert is_close(back.curve.lr_at(update), narrow.lr_at(update + 20))
    assert back.curve.lr_at(180) == low


@pytest.mark.parametrize("how", CONTINUOUS)
def test_the_same_plan_changes_nothing(how):
    old = run(103, 4, num_train_epochs=2)
    for at in positions(old):
        curve = remap(saved(old, at), old, how).curve
        assert curve.total_updates == old.total_updates, at
        if how == "keep_lr":
            continue
        for update in range(1, old.total_updates + 1):
            assert is_close(curve.lr_at(update), old.lr_at(update)), (at, update)


def loop_updates(plan, at, done):
    """The updates of the running loop from a remapped place, with the open window of `at`."""
    updates, window, epoch = 0, at["micro_step_in_window"], done.epoch
    micro_step = done.micro_step_in_epoch
    while epoch < plan.num_train_epochs:
        for _ in range(micro_step, plan.micro_steps_per_epoch):
            window += 1
            if window >= plan.gradient_accumulation_steps:
                updates, window = updates + 1, 0
        if window and plan.tail == "flush":
            updates, window = updates + 1, 0
        window = 0 if plan.tail == "drop" else window
        epoch, micro_step = epoch + 1, 0
    return updates


@settings(max_examples=300, deadline=None)
@given(samples=st.integers(1, 60), epochs=st.integers(1, 3), old=sizes, new=sizes, data=st.data())
def test_what_remains_is_what_the_loop_makes(samples, epochs, old, new, data):
    common = {"dataset_size": samples, "num_train_epochs": epochs}
    old, new = planned(**common, **old), planned(**common, **new)
    at = data.draw(st.sampled_from(list(positions(old))))
    done = remap(saved(old, at), new, "keep_lr")
    assert done.remaining_updates == loop_updates(new, at, done)


@pytest.mark.parametrize("tail", ["flush", "drop"])
@pytest.mark.parametrize("accumulation, other", [(1, 2), (2, 4), (4, 8), (8, 4), (3, 5), (6, 3)])
def test_by_samples_windows_that_end_on_the_same_sample_share_a_rate(tail, accumulation, other):
    shape = {"num_train_epochs": 2, "tail": tail, "warmup_ratio": 0.3}
    old, new = run(45, accumulation, **shape), run(45, other, **shape)

    def ends(plan):
        """Update -> samples seen at its end, the dropped tail belonging to the last one."""
        per_epoch, size = plan.updates_per_epoch, plan.gradient_accumulation_steps
        for update in range(1, plan.total_updates + 1):
            epoch, window = divmod(update - 1, per_epoch)
            last = window + 1 == per_epoch
            yield 45 * epoch + (45 if last else (window + 1) * size), update

    of_old = dict(ends(old))
    curve = remap(saved(old, clock(0)), new, "by_samples").curve
    shared = [(of_old[end], update) for end, update in ends(new) if end in of_old]
    assert len(shared) > 2
    for before, now in shared:
        assert is_close(curve.lr_at(now), old.lr_at(before)), (before, now)
