"""Two hundred updates of several ranks: skips, tails and uneven weights in any mix.

The oracle is one process that runs the same micro batches, all ranks' after one another, and ends a
window where the ranks ended theirs together.
"""

import random

import pytest
import ranks
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from stepclock_ext import EMA, ClockedOptimizer, LossScale, ReducerOptions

UPDATES = 200
STEPS = 3
KINDS = ["own", "zero1", "ddp", "fsdp"]


def make_epoch(rng, world_size, *, uneven):
    """Micro batches of each rank: a weight, and whether the loss is infinite."""
    longest = rng.randint(2, 3 * STEPS + 1)
    lengths = [rng.randint(1, longest) if uneven else longest for _ in range(world_size)]
    return [
        [(rng.choice([0, 1, 1, 2, 5, 100]), rng.random() < 0.1 / world_size) for _ in range(length)]
        for length in lengths
    ]


def make_epochs(world_size, *, uneven):
    """Epochs with some 200 windows, the same for every rank."""
    rng, epochs, windows = random.Random(world_size), [], 0
    while windows < 1.4 * UPDATES:
        epochs.append(make_epoch(rng, world_size, uneven=uneven))
        windows += -(-max(map(len, epochs[-1])) // STEPS)
    return epochs


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)
    ).double()


def make_optimizer(model, kind):
    net, given = model, {}
    if kind == "ddp":
        net = DistributedDataParallel(model)
    if kind == "fsdp":
        net = fully_shard(model)
    if kind in ("ddp", "fsdp"):
        given = {"model": net}
    if kind in ("own", "zero1"):
        given = {"process_group": ReducerOptions(bucket_cap_mb=1e-4, shard_states=kind == "zero1")}
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ema = EMA(0.9)
    opt = ClockedOptimizer(
        adamw,
        gradient_accumulation_steps=10**6 if kind == "alone" else STEPS,
        max_grad_norm=0.3,
        loss_scale=LossScale(2.0**20, growth_interval=7),
        schedulers=[LambdaLR(adamw, lambda update: 0.99**update)],
        ema=ema,
        **given,
    )
    return net, opt, ema


def run_micro_step(net, opt, place, weight, is_infinite):
    epoch, rank, index = place
    data = torch.Generator().manual_seed(1_000_003 * epoch + 1009 * rank + index)
    x = torch.randn(4, 3, generator=data, dtype=torch.float64)
    y = torch.randn(4, 1, generator=data, dtype=torch.float64)
    loss = ((net(x) - y) ** 2).mean()
    opt.backward(loss * float("inf") if is_infinite and weight else loss, weight=weight)
    return opt.step()


def tell(info):
    found = (info.loss, info.grad_norm) if info.updated else ()  # NaN is not equal to itself
    return (info.updated, info.lr, info.loss_scale, *found)


def whole(p):
    return (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()


def finish(model, opt, ema, told):
    with ema.swap(model):
        averages = [whole(p) for p in model.parameters()]
    params = [whole(p) for p in model.parameters()]
    return {"told": told, "params": params, "averages": averages, "clock": opt.clock.state_dict()}


def soak(rank, world_size, kind, *, uneven):
    """A rank's run."""
    model = make_model()
    net, opt, ema = make_optimizer(model, kind)
    told = []
    for e, epoch in enumerate(make_epochs(world_size, uneven=uneven)):
        for i, (weight, is_infinite) in enumerate(epoch[rank]):
            info = run_micro_step(net, opt, (e, rank, i), weight, is_infinite)
            told += [tell(info)] if info.updated or info.skipped else []
        info = opt.end_epoch()
        told += [tell(info)] if info.updated or info.skipped else []
    return finish(model, opt, ema, told)


def soak_alone(world_size, *, uneven):
    """The same micro batches in one process."""
    model = make_model()
    net, opt, ema = make_optimizer(model, "alone")
    told = []
    for e, epoch in enumerate(make_epochs(world_size, uneven=uneven)):
        for first in range(0, max(map(len, epoch)), STEPS):
            for rank, micro_steps in enumerate(epoch):
                for i, (weight, is_infinite) in list(enumerate(micro_steps))[first:][:STEPS]:
                    run_micro_step(net, opt, (e, rank, i), weight, is_infinite)
            info = opt.flush()
            told += [tell(info)] if info.updated or info.skipped else []
        opt.end_epoch()
    return finish(model, opt, ema, told)


def assert_alike(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def assert_told_alike(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one[:3] == other[:3]
        assert one[3:] == pytest.approx(other[3:], rel=1e-8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_two_hundred_updates_are_those_of_one_process(world_size, kind):
    uneven = kind in ("own", "zero1")  # an engine needs as many micro batches on every rank
    expected = soak_alone(world_size, uneven=uneven)
    found = ranks.run(world_size, soak, world_size, kind, uneven=uneven, timeout=120)

    assert expected["clock"]["update_step"] >= UPDATES
    assert expected["clock"]["skipped_updates"] > 10
    for other in found[1:]:
        assert other["clock"] == found[0]["clock"]
        for name in ("params", "averages"):
            assert all(map(torch.equal, other[name], found[0][name])), name
    for name in ("update_step", "skipped_updates", "epoch", "weight_seen"):
        assert found[0]["clock"][name] == expected["clock"][name], name
    if not uneven:  # else a rank that has ended hears of its last window alone
        assert found[0]["told"] == found[-1]["told"]
        assert_told_alike(found[0]["told"], expected["told"])
    assert_alike(found[0]["params"], expected["params"])
    assert_alike(found[0]["averages"], expected["averages"])
