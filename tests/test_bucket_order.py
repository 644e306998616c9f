"""Buckets follow the order in which gradients arrive, whatever the groups are."""

import copy
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import pytest
import ranks
import torch

from stepclock_ext import ClockedOptimizer, ReducerOptions

LAYERS = 6
CAP = 1e-3  # MiB: a bucket for each layer


def make(frozen=0, **options):
    """A deep model in two groups, with weight decay and without: the usual way."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 16) for _ in range(LAYERS)]
    for layer in layers[:frozen]:
        layer.requires_grad_(False)
    model = torch.nn.Sequential(*layers)
    groups = [
        {"params": [layer.weight for layer in layers], "weight_decay": 0.1},
        {"params": [layer.bias for layer in layers], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2)
    return model, ClockedOptimizer(
        adamw, process_group=ReducerOptions(bucket_cap_mb=CAP, **options)
    )


def note(opt, seen, before, _):
    seen.append(opt._pass.accumulator.reduction.num_collectives - before)


def watch(rank, shard):
    """Collectives under way when the backward comes to each layer, window by window."""
    model, opt = make(shard_states=shard)
    windows = []
    for _ in range(3):
        seen, x = [], torch.ones(16)
        before = opt._pass.accumulator.reduction.num_collectives
        for layer in model:
            x = layer(x)
            x.register_hook(partial(note, opt, seen, before))
        opt.backward(x.sum())
        opt.step()
        windows.append(seen)
    return windows


@pytest.mark.parametrize("shard", [False, True])
def test_from_the_second_window_on_buckets_go_out_layer_by_layer(shard):
    for first, second, third in ranks.run(2, watch, shard):
        assert first == [0] * LAYERS
        assert second[-1] >= LAYERS // 2  # when autograd has come to the first layer
        assert second == third == sorted(third)


def resume(rank, shard, saves_at, state=None):
    model, opt = make(shard_states=shard)
    if state is not None:
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
    found = None
    for update in range(opt.clock.update_step, 5):
        opt.backward(model(torch.randn(16, generator=torch.Generator().manual_seed(update))).sum())
        opt.step()
        if update + 1 == saves_at:
            weights = {name: p.clone() for name, p in model.state_dict().items()}
            found = {"model": weights, "opt": copy.deepcopy(opt.state_dict())}
    return found, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("shard", [False, True])
def test_a_resumed_run_has_the_buckets_of_the_one_that_was_saved(shard):
    """Four ranks: there the place in a bucket decides in which order a ring adds."""
    unbroken = ranks.run(4, resume, shard, 2)
    resumed = ranks.run(4, resume, shard, 0, unbroken[0][0])
    for (_, expected), (_, found) in zip(unbroken, resumed, strict=True):
        assert all(map(torch.equal, found, expected))


def count_bytes(rank, frozen):
    model, opt = make(frozen)
    for _ in range(3):
        opt.backward(model(torch.ones(16)).sum())
        before = opt._pass.accumulator.reduction.num_bytes
        opt.step()
        opt.backward(model(torch.ones(16)).sum())
        opt.step()
    reduction = opt._pass.accumulator.reduction
    return reduction.num_bytes - before, [p.detach().clone() for p in model.parameters()]


def test_frozen_parameters_do_not_travel():
    whole, part = ranks.run(2, count_bytes, 0), ranks.run(2, count_bytes, 4)
    assert part[0][0] * 3 == whole[0][0]
    started = [p.detach() for p in make_alone().parameters()]
    assert all(map(torch.equal, part[0][1][: 2 * 4], started[: 2 * 4]))
    assert all(map(torch.equal, part[0][1], part[1][1]))


def make_alone():
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(LAYERS)])


SCRIPT = """
import datetime, sys, time, torch
import torch.distributed as dist
from stepclock_ext import ClockedOptimizer, ReducerOptions
rank = int(sys.argv[1])
dist.init_process_group(
    "gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2,
    timeout=datetime.timedelta(minutes=10),
)
w = torch.nn.Parameter(torch.zeros(100_000))
options = ReducerOptions(timeout=datetime.timedelta(seconds=3))
opt = ClockedOptimizer(torch.optim.SGD([w], lr=1.0), process_group=options)
for update in range(3):
    if rank == 1 and update == 2:
        time.sleep(600)
    opt.backward(w.sum())
    opt.step()
"""


def test_a_process_whose_peer_hangs_ends_with_its_error(tmp_path):
    """Really ends, with its threads, although the group would be patient for ten minutes."""
    script = Path(tmp_path, "run.py")
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, str(script)]
    store = str(tmp_path / "store")
    stuck = subprocess.Popen([*command, "1", store])
    start = time.monotonic()
    try:
        waiting = subprocess.run(
            [*command, "0", store], capture_output=True, text=True, timeout=60, check=False
        )
    finally:
        stuck.kill()
        stuck.wait()
    assert waiting.returncode != 0
    assert "rank 1 did not come" in waiting.stderr
    assert "the end of update 3 within 3 s" in waiting.stderr
    assert time.monotonic() - start < 45
