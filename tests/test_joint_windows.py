"""All ranks end the same windows: what they decide together, and what must be common to them."""

import copy
from math import inf, isnan, nan

import pytest
import ranks
import torch
from helpers import clocked_sgd, given, parameter
from tolerance import assert_near
from torch.optim.lr_scheduler import LambdaLR

from stepclock_ext import EMA, ClockedOptimizer, LossScale, NonFiniteGradientError, ReducerOptions

each_world = pytest.mark.parametrize("world", [2, 4])
each_shard = pytest.mark.parametrize("shard", [False, True])
SOON = {"timeout": 10.0, "group_timeout": 5.0}  # where ranks may wait for each other for ever


def start(*params, shard=False, **options):
    return clocked_sgd(*params, process_group=ReducerOptions(shard_states=shard), **options)


def assert_alike(results):
    assert len({repr(result) for result in results}) == 1  # a text: NaN is not NaN


# ---- What must be common -----------------------------------------------------------------------


def disagree(rank, name, values):
    """What a rank is told once its value is not that of the others."""
    w = parameter(0.0)
    opt = start(w, loss_scale=1.0)
    setattr(opt.clock if name == "update_step" else opt, name, values[rank])
    with pytest.raises(RuntimeError) as caught:
        for _ in range(opt.gradient_accumulation_steps):
            opt.backward(w * 1.0)
            opt.step()
    opt.discard()
    assert w.item() == 0.0
    return str(caught.value)


COMMON = {"update_step": "number of updates", "loss_scale": "loss scale"}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("gradient_accumulation_steps", [1, 2]),
        ("gradient_accumulation_steps", [2, 2, 3, 2]),
        ("update_step", [0, 7]),
        ("loss_scale", [8.0, 4.0]),
    ],
)
def test_what_differs_is_named_on_all_ranks_with_its_values(name, values):
    says = COMMON.get(name, name)
    shown = ", ".join(f"{value:g}" for value in values)
    for said in ranks.run(len(values), disagree, name, values, **SOON):
        assert f"the {says} must be the same on all ranks, got {shown} on ranks 0 to " in said
        assert "; load the same state" in said


# ---- Skips -------------------------------------------------------------------------------------


def overflow(rank, shard, bad, who):
    p, q = parameter(1.0, 2.0), parameter(3.0)
    inner = torch.optim.AdamW([p, q], lr=0.1)
    scheduler = LambdaLR(inner, lambda update: 0.5**update)
    opt = ClockedOptimizer(
        inner,
        gradient_accumulation_steps=2,
        loss_scale=LossScale(16.0),
        schedulers=[scheduler],
        process_group=ReducerOptions(shard_states=shard),
    )
    for value in (bad if rank == who else 1.0, 1.0):
        opt.backward(given((p, [1.0, 1.0]), (q, value)))
        info = opt.step()
    return info, opt.loss_scale, p.tolist(), q.item(), scheduler.last_epoch, opt.clock.state_dict()


@each_world
@each_shard
@pytest.mark.parametrize("bad", [inf, -inf, nan])
def test_one_bad_gradient_on_one_rank_is_skipped_by_all(world, shard, bad):
    results = ranks.run(world, overflow, shard, bad, world - 1)
    assert_alike(results)
    info, scale, p, q, last_epoch, clock = results[0]
    assert (info.updated, info.skipped, p, q, last_epoch) == (False, True, [1.0, 2.0], 3.0, 0)
    assert (scale.scale, scale.good_steps) == (8.0, 0)
    assert (clock["update_step"], clock["skipped_updates"], clock["micro_step"]) == (0, 1, 2)


def raise_on_overflow(rank, shard, options):
    """The errors of three bad windows: their parameters and texts; then a good one."""
    p, q = parameter(1.0), parameter(1.0)
    opt = start(p, q, shard=shard, **options)
    told = []
    for _ in range(3):
        try:
            opt.backward(given((p, 1.0), (q, inf if rank == 1 else 1.0)))
            opt.step()
            told.append(None)
        except NonFiniteGradientError as e:
            told.append((str(e), e.parameters))
            if opt.nonfinite == "raise":
                opt.discard()
    assert (p.item(), q.item()) == (1.0, 1.0)
    opt.backward(given((p, 1.0), (q, 1.0)))
    return told, opt.step().updated, p.item()


@each_shard
@pytest.mark.parametrize("options", [{"nonfinite": "raise"}, {"max_consecutive_skips": 3}])
def test_an_error_comes_to_all_ranks_and_names_the_same_parameters(shard, options):
    results = ranks.run(2, raise_on_overflow, shard, options)
    assert_alike(results)
    told, goes_on, p = results[0]
    assert [names for _, names in filter(None, told[2:])] == [["group 0, parameter 1"]]
    assert ("3 skips in a row at update 1" in told[2][0]) == (told[:2] == [None, None])
    assert (goes_on, p) == (True, 0.0)


# ---- Clocks and what follows them --------------------------------------------------------------


def mix(rank, tail, shard):
    """Ten windows with everything in them, over three epochs of uneven length."""
    p, q = parameter(1.0, 2.0), parameter(3.0)
    ema = EMA(0.5)
    inner = torch.optim.AdamW([p, q], lr=0.1)
    opt = ClockedOptimizer(
        inner,
        gradient_accumulation_steps=3,
        tail=tail,
        max_grad_norm=1.0,
        loss_scale=LossScale(init_scale=1024.0, growth_interval=2),
        schedulers=[LambdaLR(inner, lambda update: 1 / (1 + update))],
        ema=ema,
        process_group=ReducerOptions(shard_states=shard),
    )
    number = 0
    for epoch in range(3):
        for _ in range(8 + 3 * ((rank + epoch) % 2)):
            number += 1
            slope = inf if (number, rank) == (5, 1) else float(number + rank)
            weight = 0 if number % 5 == rank else 0.1 + number / 7 + rank
            opt.backward(given((p, [slope, 1.0]), (q, slope)) + slope * 0.5, weight=weight)
            opt.step()
        opt.end_epoch()
    values = [x.tolist() for x in (p, q, ema.average(p), ema.average(q))]
    rates = [scheduler["state"] for scheduler in opt._schedulers.state_dict()]
    return opt.clock.state_dict(), opt.loss_scale, values, rates


@each_world
@each_shard
@pytest.mark.parametrize("tail", ["flush", "drop"])
def test_ten_mixed_windows_leave_all_ranks_alike(world, shard, tail):
    results = ranks.run(world, mix, tail, shard, **SOON)
    assert_alike(results)
    clock = results[0][0]
    assert (clock["skipped_updates"], clock["epoch"]) == (1, 3)
    assert clock["update_step"] + 1 == {"flush": 12, "drop": 9}[tail]


def count(rank, num_micro):
    w = parameter(0.0)
    inner = torch.optim.SGD([w], lr=1.0)
    scheduler = LambdaLR(inner, lambda update: 0.5**update)
    options = {"gradient_accumulation_steps": 2, "process_group": ReducerOptions()}
    opt = ClockedOptimizer(inner, schedulers=[scheduler], **options)
    infos = []
    for micro in range(num_micro):
        opt.backward((w * 1.0 + 5.0) * (1 + rank + micro), weight=1 + rank)
        infos.append(opt.step())
    return infos, scheduler.last_epoch, w.item(), opt.clock.weight_seen


@each_world
def test_schedulers_move_once_an_update_whatever_the_number_of_ranks(world):
    results = ranks.run(world, count, 6)
    assert_alike(results)
    infos, last_epoch, _, weight_seen = results[0]
    assert (last_epoch, weight_seen) == (3, 6 * sum(range(1, world + 1)))
    assert [info.updated for info in infos] == [False, True] * 3
    assert [info.lr for info in infos if info.updated] == [(1.0,), (0.5,), (0.25,)]


def carry(rank, weights):
    """Three micro steps a window, of which a rank does `weights[rank]` before the epoch ends."""
    w = parameter(0.0)
    opt = start(w, gradient_accumulation_steps=3, tail="carry", loss_scale=LossScale(4.0))
    for weight in weights[rank]:
        opt.backward(w * 8.0, weight=weight)
        opt.step()
    opt.end_epoch()
    for _ in range(3 - len(weights[rank])):
        opt.backward(w * 8.0, weight=64)
        info = opt.step()
    clock = opt.clock.state_dict()
    assert clock.pop("micro_step_in_epoch") == 3 - len(weights[rank])  # in this rank's own data
    return info.updated, w.item(), clock


@pytest.mark.parametrize("weights", [[[100], [100, 100]], [[100], []], [[100], [0]]])
def test_a_carried_tail_ends_with_the_window_of_all(weights):
    results = ranks.run(2, carry, weights, **SOON)
    assert_alike(results)
    updated, moved, _ = results[0]
    assert updated
    assert_near(moved, -8.0, num_roundings=6, dtype=torch.float32)


# ---- What a StepInfo says ----------------------------------------------------------------------


def say(rank, reduction, slopes):
    """The last StepInfo of a window of two, and what the parameter moved by."""
    w = parameter(2.0)
    opt = start(w, gradient_accumulation_steps=2, reduction=reduction)
    for _ in range(2):
        opt.backward(w * slopes[rank], weight=1)
        info = opt.step()
    return info, 2.0 - w.item()


@pytest.mark.parametrize(("reduction", "mean"), [("mean", 2.0), ("sum", 4.0)])
def test_the_loss_is_that_of_the_gradient(reduction, mean):
    for info, moved in ranks.run(2, say, reduction, [1.0, 3.0]):
        assert (moved, info.grad_norm, info.loss) == (mean, mean, 2 * mean)


def test_a_loss_that_is_not_a_number_is_told_as_it_is():
    for info, _ in ranks.run(2, say, "mean", [1.0, nan]):
        assert info.skipped
        assert isnan(info.loss)


def measure_noise(rank, world, alone=False):
    w = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
    here = range(world) if alone else [rank]
    options = {"gradient_accumulation_steps": 3 * len(here), "noise_scale": True}
    opt = clocked_sgd(w, process_group=None if alone else ReducerOptions(), **options)
    for sample in [micro * world + r for micro in range(3) for r in here]:
        opt.backward((w * torch.tensor([sample, 7.0 - sample])).sum(), weight=1 + sample % 2)
        info = opt.step()
    return info.noise_scale


@each_world
def test_the_noise_scale_is_that_of_all_micro_steps(world):
    results = ranks.run(world, measure_noise, world)
    assert_alike(results)
    assert_near(results[0], measure_noise(0, world, alone=True), num_roundings=100)


# ---- What one rank alone does ------------------------------------------------------------------


def rest(rank, shard):
    """Three parameters under weight decay: used by all, by one rank, by none."""
    params = [parameter(1.0, 1.0) for _ in range(3)]
    inner = torch.optim.AdamW(params, lr=0.1, weight_decay=0.5)
    opt = ClockedOptimizer(inner, process_group=ReducerOptions(shard_states=shard))
    opt.backward(params[0].sum() + (params[1].sum() if rank == 1 else 0.0))
    opt.step()
    states = opt.state_dict()["state"]
    return [p.tolist() for p in params], sorted(i for i, s in states.items() if s)


@each_world
@each_shard
def test_no_gradient_on_any_rank_is_not_zero(world, shard):
    results = ranks.run(world, rest, shard)
    assert_alike(results)
    (used, once, never), with_state = results[0]
    assert used == once == pytest.approx([0.85] * 2)
    assert never == [1.0, 1.0]
    assert with_state == [0, 1]


def copied(rank):
    w = parameter(0.0)
    opt = start(w)
    opt.backward(w * 2.0)
    opt.step()
    other = copy.deepcopy(opt)
    for one, slope in ((opt, 1.0), (other, 10.0)):
        (p,) = one.param_groups[0]["params"]
        one.backward(p * slope)
        one.step()
    return w.item(), other.param_groups[0]["params"][0].item()


def test_a_copy_trains_with_the_same_ranks():
    assert ranks.run(2, copied, **SOON) == [(-3.0, -12.0)] * 2
