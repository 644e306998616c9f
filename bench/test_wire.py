"""What two processes send each other for an update: counted on the wire, by us, and on paper.

The kernel counts what the loopback interface transmits, headers and acknowledgements included; both
ranks send through it, so a rank has sent half. It counts other programs as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from joint_loops import NUM_PARAMETERS, DdpLoop, OursLoop
from two_ranks import print_table, run

from stepclock_ext.reduction_cost import ReductionCost

NUM_WINDOWS = 4
COLUMNS = ["an update", "wire bytes a rank", "on paper", "ratio", "payload", "on paper"]
COLUMNS += ["collectives", "on paper"]


def make_loop(engine: str, micro_steps: int) -> DdpLoop | OursLoop:
    """The loop that sends as `ReductionCost` says of this engine."""
    if engine.startswith("ddp"):
        return DdpLoop(micro_steps, every=engine == "ddp_every_micro_step")
    return OursLoop(micro_steps, shard_states=engine == "reduce_scatter")


@dataclass(frozen=True)
class Sent:
    """What an update took; `wire_bytes` of all ranks and windows."""

    engine: str
    wire_bytes: int
    payload_bytes: int
    num_collectives: int


def send_windows(rank: int, engines: list[str], micro_steps: int) -> list[Sent]:
    found = []
    for engine in engines:
        loop = make_loop(engine, micro_steps)
        payload, collectives = loop.sent()
        for _ in range(3):  # states are made, DDP's buckets built anew
            loop.window()
        before = _read_after_barriers()
        for _ in range(NUM_WINDOWS):
            loop.window()
        found.append(Sent(engine, _read_after_barriers() - before, payload, collectives))
    return found


def _read_after_barriers() -> int:
    """Bytes that loopback has transmitted; no rank sends meanwhile."""
    dist.barrier()
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            sent = int(counts.split()[8])
    dist.barrier()
    return sent


def _row(sent: Sent, cost: ReductionCost) -> list[str]:
    wire = sent.wire_bytes / 2 / NUM_WINDOWS
    paper = cost.wire_bytes + cost.control_bytes
    return [
        sent.engine,
        f"{wire:,.0f}",
        f"{paper:,}",
        f"{wire / paper:.3f}",
        f"{sent.payload_bytes:,}",
        f"{cost.payload_bytes:,}",
        f"{sent.num_collectives}",
        f"{cost.num_collectives}",
    ]


@pytest.mark.parametrize("micro_steps", [1, 8])
def test_bytes_on_the_wire_are_those_on_paper(capsys: Any, micro_steps: int) -> None:
    engines = ["all_reduce", "reduce_scatter", "ddp"] + ["ddp_every_micro_step"] * (micro_steps > 1)
    rows = []
    for sent in run(send_windows, engines, micro_steps)[0]:
        cost = ReductionCost(
            num_parameters=NUM_PARAMETERS,
            world_size=2,
            engine=sent.engine,
            gradient_accumulation_steps=micro_steps,
        )
        rows.append(_row(sent, cost))
    notes = [
        f"{NUM_PARAMETERS:,} fp32 parameters, 2 ranks, gloo; mean of {NUM_WINDOWS} windows",
        "payload and collectives of reduce_scatter: without the gather of parameters, which paper "
        "counts",
    ]
    print_table(capsys, f"windows of {micro_steps} micro steps", COLUMNS, rows, notes)
