"""Case 53: warm-up, decay and landing as a function of the update."""

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plans import schedule

from stepclock_ext.schedules import (
    DECAY_TYPES,
    KINDS,
    LANDING_KINDS,
    Schedule,
    scale_learning_rate,
)

each_kind = pytest.mark.parametrize("kind", KINDS)
each_landing_kind = pytest.mark.parametrize("kind", LANDING_KINDS)


# 53: landing, and warm-up of no length and of full length.


def test_a_cosine_is_rescaled_to_its_landing_and_not_clamped():
    cosine = schedule()
    assert cosine.lr_at(60) == pytest.approx(5.5e-4, rel=1e-12)  # clamped it would be 5e-4
    assert cosine.lr_at(5) == pytest.approx(5e-4, rel=1e-12)
    assert cosine.lr_at(10) == 1e-3
    assert cosine.lr_at(110) == 1e-4


@each_landing_kind
@pytest.mark.parametrize("low", [0.0, 1e-7, 1e-4, 1e-3])
@pytest.mark.parametrize("peak", [1e-3, 0.3, 3e-3])
def test_the_last_update_lands_exactly_and_the_rate_stays_there(kind, low, peak):
    curve = schedule(kind, peak=peak, low=low)
    assert curve.lands
    assert [curve.lr_at(update) for update in (110, 111, 10_000)] == [low] * 3
    assert curve.lr_at_position(math.inf) == low
    assert curve.lr_at(109) > low or low == peak


@pytest.mark.parametrize(("peak", "low"), [(0.3, 0.03), (0.9, 0.2)])
def test_rounding_moves_no_rate_off_the_peak(peak, low):
    # 0.03 + (0.3 - 0.03) is above 0.3, 0.2 + (0.9 - 0.2) is below 0.9
    curve = schedule(peak=peak, low=low, total=10**9)
    assert curve.lr_at(10) == peak
    assert curve.lr_at(11) <= peak


@each_kind
def test_warm_up_as_long_as_the_run_ends_at_the_peak(kind):
    curve = schedule(kind, warmup=7, total=7)
    assert curve.lr_at(7) == curve.lr_at(8) == 1e-3
    assert not curve.lands or kind == "constant"
    assert curve.lr_at(1) == (1e-3 if kind == "constant" else pytest.approx(1e-3 / 7))


@each_kind
def test_without_warm_up_the_first_update_is_on_the_main_curve(kind):
    curve = schedule(kind, warmup=0, total=4)
    assert curve.lr_at_position(0) == 1e-3
    assert curve.lr_at(1) == pytest.approx(1e-4 + 9e-4 * curve.decay(0.25), rel=1e-12)


@each_landing_kind
def test_a_run_of_one_update_without_warm_up_lands_at_once(kind):
    assert schedule(kind, warmup=0, total=1).lr_at(1) == 1e-4


@pytest.mark.parametrize("kind", ["constant", "constant_with_warmup"])
def test_a_constant_rate_does_not_land(kind):
    curve = schedule(kind)
    assert not curve.lands
    assert [curve.lr_at(update) for update in (10, 50, 110, 111)] == [1e-3] * 4


def test_an_inverse_square_root_stays_where_it_ended():
    curve = schedule("inverse_sqrt", low=0.0)
    assert curve.lr_at(40) == pytest.approx(1e-3 * (10 / 40) ** 0.5, rel=1e-12)
    assert curve.lr_at(110) == curve.lr_at(500) == pytest.approx(1e-3 * (10 / 110) ** 0.5)


# Any schedule.

no_deadline = settings(deadline=None)  # a machine that others use may stall
EPSILON = 2.0**-52
peaks = st.floats(1e-8, 10.0)
shares = st.floats(0.0, 1.0)
lengths = st.integers(1, 5000)
kinds = st.sampled_from(KINDS)


@st.composite
def schedules(draw):
    kind, total, peak = draw(kinds), draw(lengths), draw(peaks)
    warmup = 0 if kind == "constant" else draw(st.integers(0, total))
    shape = {}
    if kind == "polynomial":
        shape["power"] = draw(st.floats(0.1, 5.0))
    if kind == "warmup_stable_decay":
        shape["decay_type"] = draw(st.sampled_from(DECAY_TYPES))
        if total > warmup and draw(st.booleans()):
            shape["num_decay_steps"] = draw(st.integers(1, total - warmup))
    return schedule(kind, peak=peak, low=peak * draw(shares), warmup=warmup, total=total, **shape)


def is_smooth(curve):
    """No infinite slope, where the rounding of a position would show."""
    return curve.decay_type != "1-sqrt" and curve.power >= 1


@no_deadline
@given(schedules())
def test_any_schedule_has_its_peak_and_its_landing_exactly(curve):
    if curve.warmup_updates:
        assert curve.lr_at(curve.warmup_updates) == curve.learning_rate
    if curve.lands:
        assert curve.lr_at(curve.total_updates) == curve.min_lr
        assert curve.decay(1.0) == 0.0
    assert curve.decay(0.0) == 1.0


@no_deadline
@given(schedules(), st.integers(1, 6000))
def test_any_rate_is_between_landing_and_peak_and_falls_after_warm_up(curve, update):
    rate, next_rate = curve.lr_at(update), curve.lr_at(update + 1)
    assert 0 <= rate <= curve.learning_rate
    if update < curve.warmup_updates:
        assert rate <= next_rate
        return
    assert rate >= curve.min_lr
    assert next_rate <= rate + 4 * EPSILON * curve.learning_rate  # two neighbours are rounded


@no_deadline
@given(schedules().filter(is_smooth), shares)
def test_any_schedule_is_continuous_at_the_end_of_its_warm_up(curve, share):
    near = curve.lr_at_position(curve.warmup_updates + 1e-6 * share)
    assert near == pytest.approx(curve.learning_rate, rel=1e-5)


@no_deadline
@given(schedules(), st.integers(1, 6000))
def test_any_whole_position_is_its_update(curve, update):
    assert curve.lr_at_position(float(update)) == curve.lr_at(update)


@no_deadline
@given(schedules(), shares)
def test_any_position_between_two_updates_has_a_rate_between_theirs(curve, share):
    update = 1 + int(share * curve.total_updates)
    ends = sorted([curve.lr_at(update), curve.lr_at(update + 1)])
    between = curve.lr_at_position(update + share)
    assert ends[0] * (1 - 1e-12) <= between <= ends[1] * (1 + 1e-12)


@no_deadline
@given(schedules().filter(is_smooth), shares)
def test_any_decay_stretched_between_peak_and_landing_is_the_rate(curve, progress):
    span = curve.total_updates - curve.warmup_updates
    assume(span > 0)
    rate = curve.min_lr + (curve.learning_rate - curve.min_lr) * curve.decay(progress)
    stretched = curve.lr_at_position(curve.warmup_updates + progress * span)
    assert stretched == pytest.approx(rate, abs=1e-8 * curve.learning_rate)


# The door.

BAD = {
    "no such kind": (ValueError, {"kind": "cosine_with_restarts"}, "kind must be one of linear"),
    "no peak": (ValueError, {"peak": 0.0}, "learning_rate must be positive"),
    "a peak that is NaN": (ValueError, {"peak": math.nan}, "learning_rate must be positive"),
    "an infinite peak": (ValueError, {"peak": math.inf}, "learning_rate must be positive"),
    "a peak in words": (TypeError, {"peak": "1e-3"}, "learning_rate must be a number"),
    "a negative landing": (ValueError, {"low": -1e-9}, "min_lr must be from 0 to learning_rate"),
    "a landing above the peak": (ValueError, {"low": 2e-3}, "min_lr must be from 0"),
    "a landing that is NaN": (ValueError, {"low": math.nan}, "min_lr must be from 0"),
    "no update": (ValueError, {"total": 0, "warmup": 0}, "total_updates must be a positive"),
    "half an update": (ValueError, {"total": 10.5}, "total_updates must be a positive"),
    "a warm-up past the end": (ValueError, {"warmup": 111}, "from 0 to total_updates=110, got 111"),
    "a negative warm-up": (ValueError, {"warmup": -1}, "warmup_updates must be an integer"),
    "no power": (ValueError, {"power": 0}, "power must be positive"),
    "no timescale": (ValueError, {"timescale": 0}, "timescale must be positive"),
    "no such decay": (ValueError, {"decay_type": "exp"}, "decay_type must be one of cosine"),
    "no decay": (ValueError, {"num_decay_steps": 0}, "num_decay_steps must be an integer from 1"),
    "a decay past the run": (ValueError, {"num_decay_steps": 101}, "to the 100 updates .* 101"),
}


@pytest.mark.parametrize("error, arguments, message", BAD.values(), ids=BAD)
def test_a_schedule_refuses_by_name(error, arguments, message):
    with pytest.raises(error, match=rf"^Schedule: .*{message}"):
        schedule(**arguments)


def test_a_constant_schedule_refuses_a_warm_up():
    with pytest.raises(ValueError, match="use 'constant_with_warmup'"):
        Schedule("constant", learning_rate=1.0, total_updates=5, warmup_updates=1)


@pytest.mark.parametrize("update", [0, -1, 1.5, math.nan, math.inf])
def test_an_update_is_a_whole_number_from_one_on(update):
    with pytest.raises(ValueError, match=r"lr_at: update must be .* got "):
        schedule().lr_at(update)


@pytest.mark.parametrize("position", [-0.1, math.nan])
def test_a_position_is_a_number_from_zero_on(position):
    with pytest.raises(ValueError, match=r"position must be 0 or more, got"):
        schedule().lr_at_position(position)


@pytest.mark.parametrize("progress", [-0.1, 1.1, math.nan])
def test_progress_is_from_zero_to_one(progress):
    with pytest.raises(ValueError, match=r"progress must be from 0 to 1, got"):
        schedule().decay(progress)


# 24: the rate moves with the batch by the rule that was asked for.


@pytest.mark.parametrize(
    ("rule", "rate"), [("linear", 0.04), ("sqrt", 0.02 * 2**0.5), ("none", 0.02)]
)
def test_twice_the_batch_scales_the_rate_by_the_rule(rule, rate):
    scaled = scale_learning_rate(0.02, old_batch_size=20, new_batch_size=40, rule=rule)
    assert scaled == pytest.approx(rate, rel=1e-6)


def test_there_is_no_other_rule_and_no_empty_batch():
    with pytest.raises(ValueError, match=r"rule must be 'linear', 'sqrt' or 'none', got 'auto'"):
        scale_learning_rate(0.02, old_batch_size=20, new_batch_size=40, rule="auto")
    with pytest.raises(ValueError, match="old_batch_size must be positive, got 0"):
        scale_learning_rate(0.02, old_batch_size=0, new_batch_size=40, rule="linear")
