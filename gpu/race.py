"""Rivals timed in turn, round by round, and what their times say beside the device's own copy."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gpu.device import Device

__all__ = ["Rival", "measure_copy", "race"]

WARM_UPS = 2
COPY_ROUNDS = 20


@dataclass(frozen=True)
class Rival:
    """One way to do the work: `prepare` is not timed, `run` is.

    Attributes:
        name: as it is reported.
        prepare: makes the work ready.
        run: does it.
        moved_bytes: that the work has to read and write.
    """

    name: str
    prepare: Callable[[], object]
    run: Callable[[], object]
    moved_bytes: int


def measure_copy(device: Device, num_bytes: int) -> dict[str, Any]:
    """Bandwidth of a device-to-device copy, reads and writes counted: what a pass can reach."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device.torch)
    target = torch.zeros_like(source)
    times = [device.time_ms(lambda: target.copy_(source)) for _ in range(WARM_UPS + COPY_ROUNDS)]
    assert bool((target == 1).all()), "the copy did not copy"
    return _summary(times[WARM_UPS:], 2 * num_bytes)


def race(device: Device, rivals: list[Rival], rounds: int, copy_gb_per_s: float) -> list[Any]:
    """Times all rivals once in every round.

    Returns:
        One row a rival: median and quartiles in ms, its ratio to the first rival's median, bytes,
        GB/s, and GB/s as a share of the measured copy's.
    """
    times: dict[str, list[float]] = {rival.name: [] for rival in rivals}
    for _ in range(WARM_UPS + rounds):
        for rival in rivals:
            rival.prepare()
            times[rival.name].append(device.time_ms(rival.run))
    rows: list[dict[str, Any]] = []
    for rival in rivals:
        row = _summary(times[rival.name][WARM_UPS:], rival.moved_bytes)
        row["share_of_copy"] = row["gb_per_s"] / copy_gb_per_s
        row["ratio"] = row["median_ms"] / (rows[0]["median_ms"] if rows else row["median_ms"])
        rows.append({"name": rival.name, **row})
    return rows


def _summary(times: list[float], moved_bytes: int) -> dict[str, Any]:
    ordered = sorted(times)
    median = statistics.median(ordered)
    return {
        "median_ms": median,
        "low_ms": ordered[len(ordered) // 4],
        "high_ms": ordered[(3 * len(ordered)) // 4],
        "rounds": len(ordered),
        "bytes": moved_bytes,
        "gb_per_s": moved_bytes / median / 1e6,
    }
