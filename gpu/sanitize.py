"""The small case that compute-sanitizer runs: every op once on tensors with every edge.

``python -m gpu.sanitize cuda cuda``: a backend and a device.
"""

from __future__ import annotations

import itertools
import sys
from functools import partial

import torch
from fused import Rows, add_averages, add_masters, exact_params, make_rows

from gpu.device import Device
from gpu.subject import on
from gpu.updates import adam_, average_, sgd_
from stepclock_ext import ops

__all__ = ["DONE", "run_small_case"]

SIZES = [0, 1, 255, 257, 16383, 16385]
KINDS = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)]
DONE = "the small case is done"
NUM_SLOTS = (1, 5_000, 70_000)


def run_small_case(backend: ops.Backend, sizes: list[int] = SIZES) -> None:
    """Runs the ops; what they compute is the parity suite's business."""
    for (dtype, sums), unaligned in itertools.product(KINDS, (False, True)):
        rows = make_rows("reference", sizes, dtype, sums=sums, state=sums, unaligned=unaligned)
        add_averages(rows)
        if dtype in ops.HALVES:
            update_rows(on(rows, backend), rounding_key=7)
            add_masters(rows, exact_params(rows.params))
        update_rows(on(rows, backend), is_gated=True)
    layout = ops.Layout.of(backend, [])
    stats = ops.make_stats(backend.device)
    for num_slots, maxima in itertools.product(NUM_SLOTS, (False, True)):
        slots = ops.make_slots(num_slots, backend.device)
        ops.coefficient_(stats, slots, layout, divisor=2.0, max_norm=1.0, maxima=maxima)


def update_rows(rows: Rows, **along: int | bool) -> None:
    """Gradients, norm, coefficient, and each update."""
    layout, device = rows.layout, rows.layout.backend.device
    slots = [ops.make_slots(layout.num_slots, device) for _ in range(3)]
    stats = ops.make_stats(device)
    into = dict(zip(("slots", "grad_slots", "prior_slots"), slots, strict=True))
    for store in (True, False):
        ops.accumulate_(rows.sums, rows.params, layout, store=store, **into)
    ops.max_abs_(slots[1], rows.sums, layout)
    ops.sum_squares_(slots[0], rows.sums, layout)
    ops.coefficient_(stats, slots[0], layout, divisor=2.0, max_norm=1.0)
    ops.scale_(rows.sums, stats, layout)
    for update in map(partial, (adam_, sgd_, average_)):
        update(rows, average_weight=0.1, **along)


if __name__ == "__main__":
    where = Device(sys.argv[2])
    run_small_case(ops.make_backend(sys.argv[1], where.torch))
    where.synchronize()
    print(DONE)
