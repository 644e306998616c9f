"""The LR Fence: what differs between a checkpoint and now, and what it does to the rate."""

import pickle

import pytest
from plans import plan
from saved_runs import SETTINGS, clock, positions, run, saved

from stepclock_ext.errors import ScheduleMismatchError
from stepclock_ext.fence import LRFence, fingerprint, refusal
from stepclock_ext.remap import remap

close = pytest.approx


def check(old, at, new, *, settings=SETTINGS, **options):
    return LRFence(new, settings=settings).check(saved(old, at), **options)


# The comparison.


def test_the_same_plan_matches_at_every_place():
    old = run(31, 4, num_train_epochs=3, tail="carry")
    for at in positions(old):
        report = check(old, at, run(31, 4, num_train_epochs=3, tail="carry"))
        assert (report.matches, report.differences) == (True, {})
        assert report.total_updates == old.total_updates
        assert report.remaining_updates == old.total_updates - at["update_step"]


@pytest.mark.parametrize(
    "changes",
    [
        {"dataset_size": 90},
        {"per_device_train_batch_size": 2},
        {"gradient_accumulation_steps": 2},
        {"world_size": 2},
        {"dataloader_drop_last": True},
        {"sampler_drop_last": True},
        {"tail": "carry"},
        {"num_train_epochs": 2},
        {"warmup_steps": 3},
        {"lr_scheduler_type": "linear"},
        {"min_lr": 0.2},
        {"learning_rate": 2.0},
    ],
)
def test_each_argument_of_the_plan_is_compared(changes):
    (name, value), *_ = changes.items()
    report = check(run(100, 4), 5, run(100, 4, **changes))
    assert not report.matches
    shown = {"num_train_epochs": "total_updates", "warmup_steps": "warmup_updates"}.get(name, name)
    assert shown in report.differences
    if shown == name:
        assert report.differences[name][1] == value


def test_the_parameters_of_the_shape_are_compared():
    one, two = (
        run(100, lr_scheduler_type="polynomial", lr_scheduler_kwargs={"power": power})
        for power in (1.0, 2.0)
    )
    assert check(one, 5, two).differences == {
        "lr_scheduler_kwargs": ({"power": 1.0}, {"power": 2.0})
    }


@pytest.mark.parametrize(
    "name, value", [("reduction", "sum"), ("max_grad_norm", 1.0), ("norm_type", float("inf"))]
)
def test_the_settings_are_compared_with_a_plan_and_without(name, value):
    now = {**SETTINGS, name: value}
    for new in (None, run(100)):
        report = check(run(100), 5, new, settings=now)
        assert report.differences == {name: (SETTINGS[name], value)}


@pytest.mark.parametrize("name", ["gradient_accumulation_steps", "world_size", "tail"])
def test_without_a_plan_accumulation_ranks_and_tail_are_compared(name):
    now = {**SETTINGS, name: "drop" if name == "tail" else 4}
    report = LRFence(None, settings=now).check(saved(None, clock(3)))
    assert report.differences == {name: (SETTINGS[name], now[name])}
    assert (report.remaining_updates, report.landing, report.lr_after) == (None, None, ())


def test_epochs_and_the_same_number_of_steps_are_the_same_plan():
    assert check(run(100, 4), 5, run(100, 4, max_steps=25)).matches


@pytest.mark.parametrize("state", [{}, {"state": {}, "param_groups": []}, {"stepclock": {}}])
def test_what_a_checkpoint_does_not_say_is_unknown_and_differs(state):
    report = LRFence(run(100), settings=SETTINGS).check(state)
    assert report.differences["dataset_size"] == ("unknown", 100)
    assert report.differences["max_grad_norm"] == ("unknown", None)
    assert (report.update_step, report.remaining_updates, report.lr_before) == (None, None, ())
    assert "unknown" in report.table()


def test_one_missing_name_is_unknown():
    state = saved(run(100), 5)
    del state["stepclock"]["fingerprint"]["sampler_drop_last"]
    report = LRFence(run(100)).check(state)
    assert report.differences == {"sampler_drop_last": ("unknown", False)}
    assert report.remaining_updates == 95


def test_a_fingerprint_is_plain_values_and_holds_the_plan():
    found = fingerprint(run(100, 4), SETTINGS)
    assert found["gradient_accumulation_steps"] == 4  # the plan's
    assert (found["total_updates"], found["reduction"]) == (25, "mean")
    plain = (int, float, str, bool, dict, type(None))
    assert all(type(value) in plain for value in found.values())


def test_damage_is_said():
    with pytest.raises(TypeError, match="LRFence: the saved state must be a mapping, got list"):
        LRFence(run(100)).check([])
    with pytest.raises(TypeError, match="LRFence: plan must be a TrainPlan or None, got 8"):
        LRFence(8)
    state = saved(run(100), 5)
    state["stepclock"]["fingerprint"]["tail"] = "curl"
    with pytest.raises(ValueError, match=r"LRFence: the saved fingerprint is damaged; .*curl"):
        LRFence(run(100)).check(state)
    state = saved(run(100), 5)
    state["stepclock"]["curve"] = {"how": "hold"}
    with pytest.raises(ValueError, match="LRFence: the saved curve is damaged"):
        LRFence(run(100)).check(state)


# What it does to the rate.


def test_the_jump_that_a_plain_resume_makes_is_seen():
    old, new = run(8000, 8, min_lr=0.0), run(8000, 1, min_lr=0.0)
    report = check(old, 495, new)
    assert not report.matches
    assert (round(report.lr_before[-1], 2), round(report.lr_after[0], 2)) == (0.51, 0.99)
    assert report.jump == close(1.95, abs=0.02)
    for how in ("by_samples", "by_progress", "keep_lr", "hold"):
        report = check(old, 495, new, remap=how)
        assert report.jump == close(1.0, abs=5e-3)
        assert report.total_updates == 495 + 8000 - 495 * 8


def test_24_twice_the_ranks_is_refused_and_counted():
    def two_epochs(world_size, **changes):
        return plan(
            dataset_size=800,
            per_device_train_batch_size=10,
            gradient_accumulation_steps=1,
            num_train_epochs=2,
            world_size=world_size,
            learning_rate=0.02,
            **changes,
        )

    report = check(two_epochs(2), clock(40, 1, 0), two_epochs(4))
    assert report.differences == {
        "world_size": (2, 4),
        "total_updates": (80, 40),
    }
    assert (report.remaining_updates, report.total_updates) == (20, 60)
    assert report.landing == (60, 0.0)
    for scaling, factor in [("linear", 2.0), ("sqrt", 2**0.5), (None, 1.0)]:
        options = {"remap": "by_progress", "lr_scaling": scaling}
        report = check(two_epochs(2), clock(40, 1, 0), two_epochs(4), **options)
        assert report.factor == close(factor)
        assert report.lr_after[0] == close(factor * two_epochs(2).lr_at(42), rel=1e-12)
        assert (report.landing, len(report.lr_after)) == ((60, 0.0), 20)


def test_a_report_holds_up_to_200_rates_each():
    old = run(1000, warmup_steps=100)
    report = check(old, 300, old)
    assert report.lr_before == tuple(old.lr_at(update) for update in range(101, 301))
    assert report.lr_after == tuple(old.lr_at(update) for update in range(301, 501))
    assert report.warmup_interval == (1, 100)
    assert report.landing == (1000, 0.1)
    report = check(old, 950, run(1000, 2, warmup_steps=100), remap="by_progress")
    assert (len(report.lr_before), len(report.lr_after)) == (200, 25)
    assert check(run(100), 100, run(50)).lr_after == (0.1,)


def test_a_warmup_that_goes_on_is_told_where_it_ends():
    old, new = run(100, warmup_ratio=0.4), run(100, 2, warmup_ratio=0.4)
    assert check(old, 20, new, remap="by_samples").warmup_interval == (1, 30)
    assert check(run(100), 20, run(100)).warmup_interval is None


def test_after_a_remap_the_same_plan_matches_and_the_curve_goes_on():
    old, new = run(800, 4), run(800, 8)
    curve = remap(saved(old, 40), new, "keep_lr").curve
    report = LRFence(new).check(saved(new, clock(60, 0, 320), curve=curve))
    assert report.matches
    assert report.landing == (120, 0.1)
    assert report.lr_after == tuple(curve.lr_at(update) for update in range(61, 121))
    assert report.lr_before[-1] == curve.lr_at(60)


def test_a_remap_needs_a_plan_now():
    with pytest.raises(ValueError, match="LRFence: remap needs a plan"):
        check(run(100), 5, None, remap="hold")


# Shown.


def test_the_table_says_what_differs_and_what_becomes_of_the_rate():
    text = check(run(800, 4), 100, run(800, 8)).table()
    for words in ("gradient_accumulation_steps", "is not the saved one", "update 150, rate 0.1"):
        assert words in text
    assert text.isascii()
    text = check(run(800, 4), 100, run(800, 8), remap="hold").table()
    assert "note: 'hold' does not land" in text
    assert "is the saved one" in check(run(800, 4), 100, run(800, 4)).table()


@pytest.mark.parametrize("how", [None, "by_samples"])
def test_the_picture_is_written(tmp_path, how):
    path = tmp_path / "fence.png"
    check(run(800, 4), 100, run(800, 8), remap=how).plot(path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_an_unknown_run_is_still_one(tmp_path):
    path = tmp_path / "fence.png"
    LRFence(None, settings=SETTINGS).check({}).plot(path)
    assert path.exists()


def test_the_error_carries_the_report_through_pickle():
    report = check(run(800, 4), 100, run(800, 8))
    error = refusal(report)
    assert isinstance(error, RuntimeError)
    assert "gradient_accumulation_steps" in str(error).splitlines()[0]
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, ScheduleMismatchError)
    assert (str(again), again.report) == (str(error), report)
