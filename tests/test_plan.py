"""Cases 10, 14, 15, 24, 53, 55, 56: what a plan counts."""

import copy
import dataclasses
import math
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import micro_plan, plan

from stepclock_ext.plan import TrainPlan
from stepclock_ext.schedules import KINDS

# Right values.


@pytest.mark.parametrize(("tail", "updates", "total"), [("flush", 94, 282), ("drop", 93, 279)])
def test_24000_samples_on_eight_devices(tail, updates, total):
    run = plan(tail=tail)
    assert (run.effective_batch_size, run.micro_steps_per_epoch) == (256, 750)
    assert (run.updates_per_epoch, run.total_updates, run.num_epochs) == (updates, total, 3)


def test_carried_tails_are_counted_over_all_epochs():
    assert plan(tail="carry").total_updates == 3 * 750 // 8 == 281


@pytest.mark.parametrize(("drop", "updates"), [(False, 782), (True, 781)])
def test_50000_samples_in_batches_of_64(drop, updates):
    run = micro_plan(50_000, 1, per_device_train_batch_size=64, dataloader_drop_last=drop)
    assert run.updates_per_epoch == updates


def test_the_effective_batch_is_devices_times_batch_times_accumulation():
    run = plan(world_size=4, per_device_train_batch_size=8, gradient_accumulation_steps=4)
    assert run.effective_batch_size == 128


# 10: the horizon is in updates.


def test_400_micro_steps_in_windows_of_four_are_100_updates():
    run = micro_plan(400, 4, num_train_epochs=1)
    assert run.total_updates == run.schedule.total_updates == 100
    assert run.lr_at(100) == 0.0


# 14 and 15: windows and epochs.


@pytest.mark.parametrize(("tail", "total"), [("flush", 4), ("carry", 1)])
def test_windows_longer_than_an_epoch(tail, total):
    assert micro_plan(3, 8, num_train_epochs=4, tail=tail).total_updates == total


@pytest.mark.parametrize(
    "changes",
    [{"tail": "drop"}, {"tail": "drop", "max_steps": 5}, {"tail": "carry", "num_train_epochs": 2}],
)
def test_a_run_that_never_updates_is_refused(changes):
    with pytest.raises(ValueError, match=r"must have an update, got none from 3 micro steps.*of 8"):
        micro_plan(3, 8, **changes)


@pytest.mark.parametrize(
    ("tail", "updates"), [("flush", [1, 2, 2, 3]), ("drop", [1, 2, 2]), ("carry", [0, 1, 2, 2])]
)
def test_updates_of_an_epoch_in_windows_of_four(tail, updates):
    sizes = (7, 8, 9) if tail == "drop" else (1, 7, 8, 9)
    plans = [micro_plan(n, 4, tail=tail, num_train_epochs=4) for n in sizes]
    assert [run.updates_per_epoch for run in plans] == updates


@pytest.mark.parametrize(("tail", "epochs"), [("flush", 5), ("carry", 6), ("drop", 10)])
def test_ten_updates_of_seven_batches_in_windows_of_four(tail, epochs):
    run = micro_plan(7, 4, max_steps=10, tail=tail)
    assert (run.total_updates, run.num_epochs) == (10, epochs)


@pytest.mark.parametrize("epochs, total", [(0.5, 47), (1.5, 141), (0.01, 1), (2.0, 188)])
def test_a_fraction_of_an_epoch_is_rounded_up_to_an_update(epochs, total):
    run = plan(num_train_epochs=epochs)
    assert (run.total_updates, run.num_epochs) == (total, math.ceil(epochs))


# 24: another world size.


def test_twice_the_ranks_halve_the_updates_and_the_rate_is_the_callers_choice():
    ranks = {"dataset_size": 800, "per_device_train_batch_size": 10, "learning_rate": 0.02}
    two = plan(**ranks, gradient_accumulation_steps=1, world_size=2)
    four = dataclasses.replace(two, world_size=4)
    assert (two.updates_per_epoch, four.updates_per_epoch) == (40, 20)
    rates = [four.scaled_learning_rate(two.effective_batch_size, r) for r in ("linear", "sqrt")]
    assert rates == pytest.approx([0.04, 0.0282843], rel=1e-5)
    assert four.scaled_learning_rate(two.effective_batch_size, "none") == four.learning_rate == 0.02


# 53: warm-up and landing.


def test_a_plan_lands_where_case_53_says():
    rates = {"learning_rate": 1e-3, "min_lr": 1e-4, "warmup_steps": 10}
    run = micro_plan(110, 1, num_train_epochs=1, **rates)
    assert [run.lr_at(update) for update in (5, 10, 60, 110, 111)] == pytest.approx(
        [5e-4, 1e-3, 5.5e-4, 1e-4, 1e-4], rel=1e-12
    )
    assert run.lr_at(110) == 1e-4


@pytest.mark.parametrize(
    ("ratio", "total", "updates"),
    [(0.07, 100, 7), (0.1, 282, 29), (0.03, 100, 3), (0.29, 100, 29), (1e-5, 100, 1), (1, 9, 9)],
)
def test_warm_up_is_the_ceiling_of_the_exact_decimal_product(ratio, total, updates):
    # in floats 0.07 * 100 is 7.000000000000001, whose ceiling is 8
    assert plan(max_steps=total, warmup_ratio=ratio).warmup_updates == updates


def test_warm_up_steps_win_over_the_ratio():
    assert plan(warmup_steps=20, warmup_ratio=0.5).warmup_updates == 20
    assert plan(warmup_steps=0, warmup_ratio=0.5).warmup_updates == 141


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_can_be_planned(kind):
    run = plan(lr_scheduler_type=kind, warmup_ratio=0.1, min_lr=1e-4)
    assert run.lr_at(run.warmup_updates or 1) == pytest.approx(1e-3, rel=1e-2)
    assert (run.lr_at(282) == 1e-4) == run.schedule.lands


def test_a_shape_takes_its_own_parameters():
    shape = {"num_decay_steps": 30, "decay_type": "linear"}
    run = plan(lr_scheduler_type="warmup_stable_decay", lr_scheduler_kwargs=shape)
    assert run.lr_at(252) == 1e-3
    assert run.lr_at(267) == pytest.approx(5e-4)


# 55: samplers and loaders.


@pytest.mark.parametrize(
    ("sampler", "loader", "tail", "micro_steps", "updates"),
    [
        (False, False, "flush", 13, 5),
        (False, False, "drop", 13, 4),
        (False, True, "flush", 13, 5),
        (True, False, "flush", 13, 5),
        (True, True, "flush", 12, 4),
    ],
)
def test_103_samples_on_four_ranks(sampler, loader, tail, micro_steps, updates):
    run = plan(
        dataset_size=103,
        world_size=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        sampler_drop_last=sampler,
        dataloader_drop_last=loader,
        tail=tail,
    )
    assert (run.micro_steps_per_epoch, run.updates_per_epoch) == (micro_steps, updates)


def test_a_loader_without_a_length_needs_max_steps():
    with pytest.raises(ValueError, match=r"max_steps must be positive .*dataset_size=None.*got -1"):
        plan(dataset_size=None)
    run = plan(dataset_size=None, num_train_epochs=None, max_steps=3)
    assert (run.total_updates, run.remaining_updates(1)) == (3, 2)
    assert (run.num_epochs, run.micro_steps_per_epoch, run.updates_per_epoch) == (None,) * 3


@pytest.mark.parametrize("changes", [{"dataset_size": 3}, {"per_device_train_batch_size": 4000}])
def test_an_epoch_without_a_whole_batch_is_refused(changes):
    drop = {"sampler_drop_last": True, "dataloader_drop_last": True}
    with pytest.raises(ValueError, match="an epoch must have a micro step, got dataset_size="):
        plan(**drop, **changes)


# 56: a global batch.


def global_plan(global_batch_size, per_device, world_size, **changes):
    arguments = {"dataset_size": None, "max_steps": 10, "learning_rate": 1e-3, **changes}
    return TrainPlan.from_global_batch(
        global_batch_size=global_batch_size,
        per_device_train_batch_size=per_device,
        world_size=world_size,
        **arguments,
    )


def test_a_global_batch_is_shared_by_all_nodes():
    run = global_plan(1024, 16, 8 * 2)
    assert (run.gradient_accumulation_steps, run.effective_batch_size) == (4, 1024)
    assert global_plan(24, 8, 1).gradient_accumulation_steps == 3


@pytest.mark.parametrize(("batch", "nearest"), [(100, "96 and 128"), (20, "32"), (33, "32 and 64")])
def test_a_global_batch_that_does_not_fit_offers_the_nearest(batch, nearest):
    with pytest.raises(
        ValueError, match=rf"global_batch_size .* = 32, got {batch}; .*: {nearest}$"
    ):
        global_plan(batch, 8, 4)


def test_a_global_batch_excludes_an_accumulation():
    with pytest.raises(TypeError, match="gradient_accumulation_steps is what is solved for"):
        global_plan(64, 8, 4, gradient_accumulation_steps=2)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [((0, 8, 4), "global_batch_size"), ((64, 0, 4), "per_device"), ((64, 8, 0), "world_size")],
)
def test_a_global_batch_of_nothing_is_refused(arguments, name):
    with pytest.raises(ValueError, match=rf"{name}\w* must be a positive integer, got 0"):
        global_plan(*arguments)


def test_a_plan_takes_keywords_only_and_is_frozen():
    with pytest.raises(TypeError, match="positional"):
        TrainPlan(100)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan().world_size = 2


def test_a_plan_is_a_value():
    run = plan(lr_scheduler_type="polynomial", lr_scheduler_kwargs={"power": 2.0})
    assert run.total_updates == 282
    copies = [copy.deepcopy(run), pickle.loads(pickle.dumps(run)), dataclasses.replace(run)]
    assert all(other == run and hash(other) == hash(run) for other in copies)
    assert dataclasses.replace(run, world_size=4).total_updates == 564


# Any plan.


@settings(deadline=None)
@given(st.integers(1, 10**9), st.decimals(0, 1, allow_nan=False, places=4))
def test_any_warm_up_is_exact(total, ratio):
    run = plan(max_steps=total, warmup_ratio=float(ratio))
    exact = int(ratio.scaleb(4)) * total
    assert run.warmup_updates == -(-exact // 10_000)
