"""How many kernels an op starts for many small tensors, and an update as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fused import ADAM, PLAIN_ADAM, Rows, add_averages, make_rows
from tolerance import assert_all_bit_equal

from gpu.outcomes import NO_GPU, PASS
from gpu.setting import Found, Setting, run_each
from gpu.subject import on
from gpu.updates import adam_, average_, sgd_
from stepclock_ext import ops

__all__ = ["count", "replay"]

MOST = 3  # kernels of an op; the number of tensors does not matter
NOT_COUNTED = "not counted"
REPLAYS = 3


def count(setting: Setting) -> Found:
    """Kernels of each op on 2,000 tensors of 500 elements."""
    num_tensors = 20 if setting.is_small else 2_000
    backend = ops.make_backend(setting.backend, setting.device.torch)
    rows = on(make_rows("reference", [500] * num_tensors, torch.float32), backend)
    add_averages(rows)
    checks = {name: lambda op=op: _count(setting, op) for name, op in _ops(rows).items()}
    found = run_each(setting, checks) | {"tensors": num_tensors}
    if found["outcome"] == PASS and not setting.device.is_cuda:
        found["outcome"] = NO_GPU
    return found


def _count(setting: Setting, op: Callable[[], None]) -> int | str:
    op()  # compiled, and its table sent
    launches = setting.device.count_launches(op)
    if launches is None:
        return NOT_COUNTED
    assert launches <= MOST, f"{launches} kernels, at most {MOST} are needed"
    return launches


def _ops(rows: Rows) -> dict[str, Callable[[], None]]:
    layout, device = rows.layout, rows.layout.backend.device
    slots, stats = ops.make_slots(layout.num_slots, device), ops.make_stats(device)
    return {
        "sum_squares_": lambda: ops.sum_squares_(slots, rows.sums, layout),
        "max_abs_": lambda: ops.max_abs_(slots, rows.sums, layout),
        "accumulate_": lambda: ops.accumulate_(rows.sums, rows.params, layout, slots=slots),
        "coefficient_": lambda: ops.coefficient_(stats, slots, layout, divisor=2.0, max_norm=1.0),
        "scale_": lambda: ops.scale_(rows.sums, stats, layout),
        "adam_": lambda: adam_(rows, average_weight=0.1),
        "sgd_": lambda: sgd_(rows, average_weight=0.1),
        "move_average_": lambda: average_(rows, average_weight=0.1),
    }


def replay(setting: Setting) -> Found:
    """An update captured once and replayed gives the bits of as many eager ones."""

    def check() -> None:
        backend = ops.make_backend(setting.backend, setting.device.torch)
        start = make_rows("reference", [1, 257, 40_001], torch.float32)
        eager, captured = on(start, backend), on(start, backend)
        update, other = _update(eager), _update(captured)
        other()  # compiled, and its table sent
        again = setting.device.capture(other)
        for _ in range(REPLAYS):
            again()
        for _ in range(1 + REPLAYS):
            update()
        setting.device.synchronize()
        assert_all_bit_equal(captured.written(), eager.written())

    found = run_each(setting, {"an update of Adam": check})
    return found | ({"outcome": setting.passed} if found["outcome"] == PASS else {})


def _update(rows: Rows) -> Callable[[], None]:
    """Norm, coefficient and Adam; nothing in it is made anew."""
    layout, device = rows.layout, rows.layout.backend.device
    slots, stats = ops.make_slots(layout.num_slots, device), ops.make_stats(device)
    states = ops.AdamStates(rows.steps, rows.moments[0], rows.moments[1], None)
    numbers: dict[str, Any] = ADAM | PLAIN_ADAM
    scalars = ops.AdamScalars(**numbers)

    def update() -> None:
        ops.sum_squares_(slots, rows.sums, layout)
        ops.coefficient_(stats, slots, layout, divisor=2.0, max_norm=1.0)
        ops.adam_(rows.params, states, rows.sums, stats, layout, scalars)

    return update
