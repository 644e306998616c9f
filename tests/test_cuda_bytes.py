"""What the CUDA kernels move, counted by the simulator: the design's bytes in 16-byte accesses."""

import pytest
import torch
from fused import PLAIN_ADAM, PLAIN_SGD, adam, move_average, sgd
from simulated import SimulatedBackend, rows_on
from tensors import coefficient_stats

from stepclock_ext import ops

FP32 = (torch.float32,) * 3
BF16 = (torch.bfloat16, torch.float32, torch.float32)
FP16 = (torch.float16, torch.float32, torch.float32)
SIZES = [40_000, 16_384, 0, 128]  # whole packs of every dtype
UNEVEN = [40_001, 7, 1]
MOMENTUM = {**PLAIN_SGD, "momentum": 0.9}
AMSGRAD = {**PLAIN_ADAM, "amsgrad": True}
MOVED = {"average_weight": 0.1}


def accumulate(rows, *, store=False):
    grads = [torch.ones_like(p) for p in rows.params]
    slots = ops.make_slots(rows.layout.num_slots)
    ops.accumulate_(rows.sums, grads, rows.layout, slots=slots, store=store)


def sum_squares(rows):
    ops.sum_squares_(ops.make_slots(rows.layout.num_slots), rows.sums, rows.layout)


def scale(rows):
    ops.scale_(rows.sums, coefficient_stats(0.5), rows.layout)


CASES = {  # bytes a parameter: loaded, stored
    "adamw fp32": (16, 12, FP32, {}, adam),
    "adamw fp32, average": (20, 16, FP32, {"averages": True}, lambda r: adam(r, **MOVED)),
    "adamw fp32, amsgrad": (20, 16, FP32, {}, lambda r: adam(r, AMSGRAD)),
    "adamw bf16": (14, 10, BF16, {}, adam),
    "adamw bf16, rounding": (14, 10, BF16, {}, lambda r: adam(r, rounding_key=3)),
    "adamw bf16, remainders": (16, 12, BF16, {"masters": True}, adam),
    "adamw bf16, remainders, average": (
        *(20, 16, BF16, {"masters": True, "averages": True}),
        lambda r: adam(r, **MOVED),
    ),
    "adamw fp16, copies": (16, 14, FP16, {"masters": True}, adam),
    "sgd fp32": (8, 4, FP32, {}, sgd),
    "sgd fp32, momentum": (12, 8, FP32, {}, lambda r: sgd(r, MOMENTUM)),
    "sgd fp32, first momentum": (8, 8, FP32, {}, lambda r: sgd(r, MOMENTUM, first=True)),
    "accumulate fp32": (8, 4, FP32, {}, accumulate),
    "accumulate bf16 into fp32": (6, 4, BF16, {}, accumulate),
    "store fp32": (4, 4, FP32, {}, lambda r: accumulate(r, store=True)),
    "store bf16 into fp32": (2, 4, BF16, {}, lambda r: accumulate(r, store=True)),
    "sum of squares fp32": (4, 0, FP32, {}, sum_squares),
    "scale fp32": (4, 4, FP32, {}, scale),
    "average fp32": (8, 4, FP32, {"averages": True}, lambda r: move_average(r, **MOVED)),
}


@pytest.fixture(scope="module")
def backend():
    return SimulatedBackend()


def counts_of(backend, name, sizes, **options):
    """The accesses of one case, and the bytes that it should load and store."""
    loads, stores, kind, along, run = CASES[name]
    rows = rows_on(backend, sizes, kind, **along, **options)
    backend.take_counts()
    run(rows)
    return backend.take_counts(), loads * sum(sizes), stores * sum(sizes)


@pytest.mark.parametrize("name", CASES)
def test_each_byte_is_moved_once_and_sixteen_at_a_time(backend, name):
    counts, loads, stores = counts_of(backend, name, SIZES)
    assert (counts.load_bytes, counts.store_bytes) == (loads, stores)
    assert counts.narrow_accesses == 0
    assert counts.wide_accesses == (loads + stores) // 16


@pytest.mark.parametrize("name", CASES)
def test_a_tail_costs_a_few_narrow_accesses_and_no_byte_more(backend, name):
    counts, loads, stores = counts_of(backend, name, UNEVEN)
    assert (counts.load_bytes, counts.store_bytes) == (loads, stores)
    num_tail = 1 + 7 + 1  # of packs of up to eight
    assert 0 < counts.narrow_accesses <= num_tail * 12


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("adamw", "sgd"))])
def test_tensors_that_are_not_aligned_cost_no_byte_more(backend, name):
    counts, loads, stores = counts_of(backend, name, SIZES, unaligned=True)
    assert (counts.load_bytes, counts.store_bytes) == (loads, stores)
    assert counts.wide_accesses == 0
