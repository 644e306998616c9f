"""What each of two processes holds after an update with sharded states, beside the ledger."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from joint_loops import NUM_PARAMETERS, loss_of, make_batches, make_model
from torch import Tensor
from two_ranks import print_table, run

from stepclock_ext import ClockedOptimizer, ReducerOptions
from stepclock_ext.memory import MemoryLedger

MICRO_STEPS = 2
PARTS = ["parameters", "gradients", "accumulators", "master weights", "moments", "total"]
COLUMNS = ["part", "ledger", "rank 0", "unexplained", "rank 1", "unexplained"]


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Of the storages under some tensors, each once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def live_tensors() -> list[Tensor]:
    """All that Python knows of."""
    gc.collect()
    found = [t for t in gc.get_objects() if issubclass(type(t), Tensor)]  # __class__ may warn
    return [t for t in found if t.layout == torch.strided and t.device.type == "cpu"]


def held_after_an_update(rank: int, dtype: torch.dtype) -> tuple[dict[str, int], str]:
    """Bytes of each part, and the bucket's and shares' of the accumulators."""
    batches = [batch.to(dtype) for batch in make_batches(MICRO_STEPS)]
    before = num_bytes(live_tensors())
    model = make_model(dtype)
    opt = ClockedOptimizer(
        torch.optim.AdamW(model.parameters()),
        gradient_accumulation_steps=MICRO_STEPS,
        master_weights=dtype == torch.bfloat16,
        process_group=ReducerOptions(shard_states=True),
    )
    for _ in range(2):
        for batch in batches:
            opt.backward(loss_of(model, batch))
            info = opt.step()
        assert info.updated
    reduction, shards = opt._pass.accumulator.reduction, opt._pass.shards
    assert reduction is not None and shards is not None
    states = [state for inner in shards.optimizers for state in inner.state.values()]
    moments = [state[key] for state in states for key in ("exp_avg", "exp_avg_sq")]
    masters = opt._companions.masters
    buckets = [bucket.flat for bucket in reduction.buckets.all]
    params = list(model.parameters())
    held = {
        "parameters": num_bytes(params),
        "gradients": num_bytes(p.grad for p in params if p.grad is not None),
        "accumulators": num_bytes(buckets + reduction.shares),
        "master weights": 0 if masters is None else num_bytes(masters._masters.values()),
        "moments": num_bytes(moments),
        "total": num_bytes(live_tensors()) - before,
    }
    said = f"buckets {num_bytes(buckets):,}, shares {num_bytes(reduction.shares):,}"
    return held, said


def test_bytes_held_with_sharded_states(capsys: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        results = run(held_after_an_update, dtype)
        ledger = MemoryLedger.of(
            make_model(dtype),
            gradient_accumulation_steps=MICRO_STEPS,
            master_weights=dtype == torch.bfloat16,
            process_group=True,
            shard_states=True,
            world_size=2,
        )
        said = dict(ledger.rows()) | {"total": ledger.total_bytes}
        rows = []
        for part in PARTS:
            cells = [part, f"{said.get(part, 0):,}"]
            for held, _ in results:
                cells += [f"{held[part]:,}", f"{held[part] - said.get(part, 0):,}"]
            rows.append(cells)
        title = f"bytes held between windows, {NUM_PARAMETERS:,} parameters, {dtype}"
        notes = [f"accumulators of rank {rank}: {text}" for rank, (_, text) in enumerate(results)]
        notes.append("total: every storage that a live tensor stands on, slots and step counts too")
        print_table(capsys, title, COLUMNS, rows, notes)
