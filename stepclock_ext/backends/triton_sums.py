"""The Triton kernels that read gradients: csrc/cuda/reduce.cu and accumulate.cu.

Bytes an element: sums 4, accumulate 12 (8 when it stores), scale 8 (fp32). gpu_to_gpu: a chunk's
slot is one program's, and values are added in pairs of neighbours, an order that no layout of
threads changes.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-not-found,import-untyped"
# ruff: noqa: SIM300  (Triton's compiler takes branches, and constants on the right)

import triton
import triton.language as tl

from .device_table import COLUMNS
from .triton_elements import (
    BLOCK,
    CHUNK,
    PLAIN,
    double,
    find_column,
    find_span,
    is_mine,
    narrow,
    square_root,
    widen,
)

__all__ = [
    "accumulate_kernel",
    "coefficient_kernel",
    "fold_kernel",
    "max_abs_kernel",
    "scale_kernel",
    "sum_squares_kernel",
]

GRAD_COLUMN = tl.constexpr(COLUMNS.index("GRAD"))
ACCUMULATOR_COLUMN = tl.constexpr(COLUMNS.index("ACCUMULATOR"))
BLOCK_LEVELS = tl.constexpr(11)  # 2**11 values are a BLOCK


@triton.jit
def square(x):
    wide = x.to(tl.float64)
    return wide * wide


@triton.jit
def magnitude(x):
    """The bits of |x|: as integers they are in the order of the numbers, and NaN is above all."""
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    else:
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return bits


@triton.jit
def sum_pairs(x):
    """The sum of BLOCK values, neighbours first."""
    for _ in tl.static_range(BLOCK_LEVELS):
        x = tl.sum(tl.reshape(x, [x.shape[0] // 2, 2]), axis=1)
    return tl.sum(x, axis=0)


@triton.jit(do_not_specialize=PLAIN)
def sum_squares_kernel(
    slots_ptr,
    chunks_ptr,
    num_elements_ptr,
    addresses_ptr,
    num_rows: tl.int64,
    first_chunk: tl.int64,
    ACCUMULATOR: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    row, begin, left, slot, _ = find_span(chunks_ptr, num_elements_ptr, first_chunk, CHUNK)
    x_ptr = find_column(
        addresses_ptr, num_rows, row, begin, ACCUMULATOR_COLUMN, ACCUMULATOR, ALIGNED
    )
    offs = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float64)
    full = left // BLOCK * BLOCK
    for i in range(0, full, BLOCK):
        squares += square(widen(tl.load(x_ptr + i + offs), ACCUMULATOR))
    if full < left:
        raw = tl.load(x_ptr + full + offs, mask=full + offs < left, other=0)
        squares += square(widen(raw, ACCUMULATOR))
    tl.store(slots_ptr + slot, sum_pairs(squares))


@triton.jit(do_not_specialize=PLAIN)
def max_abs_kernel(
    slots_ptr,
    chunks_ptr,
    num_elements_ptr,
    addresses_ptr,
    num_rows: tl.int64,
    first_chunk: tl.int64,
    ACCUMULATOR: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    row, begin, left, slot, _ = find_span(chunks_ptr, num_elements_ptr, first_chunk, CHUNK)
    x_ptr = find_column(
        addresses_ptr, num_rows, row, begin, ACCUMULATOR_COLUMN, ACCUMULATOR, ALIGNED
    )
    offs = tl.arange(0, BLOCK)
    real: tl.constexpr = tl.float64 if ACCUMULATOR == tl.float64 else tl.float32
    largest = magnitude(tl.zeros([BLOCK], real))
    full = left // BLOCK * BLOCK
    for i in range(0, full, BLOCK):
        raw = tl.load(x_ptr + i + offs)
        largest = tl.maximum(largest, magnitude(widen(raw, ACCUMULATOR)))
    if full < left:
        raw = tl.load(x_ptr + full + offs, mask=full + offs < left, other=0)
        largest = tl.maximum(largest, magnitude(widen(raw, ACCUMULATOR)))
    value = tl.max(largest, axis=0).to(real, bitcast=True)
    tl.store(slots_ptr + slot, value.to(tl.float64))


@triton.jit
def fold(slots_ptr, begin, end, MAXIMA: tl.constexpr):
    """The sum, or the largest, of slots[begin:end]."""
    offs = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    for i in range(begin, end, BLOCK):
        values = tl.load(slots_ptr + i + offs, mask=i + offs < end, other=0)
        if MAXIMA:
            larger = tl.maximum(magnitude(total), magnitude(values))
            total = larger.to(tl.float64, bitcast=True)
        else:
            total += values
    if MAXIMA:
        folded = tl.max(magnitude(total), axis=0).to(tl.float64, bitcast=True)
    else:
        folded = sum_pairs(total)
    return folded


@triton.jit(do_not_specialize=PLAIN)
def fold_kernel(
    partials_ptr, slots_ptr, num_slots: tl.int64, slots_per_program: tl.int64, MAXIMA: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    begin = program * slots_per_program
    end = tl.minimum(begin + slots_per_program, num_slots)
    tl.store(partials_ptr + program, fold(slots_ptr, begin, end, MAXIMA))


@triton.jit(do_not_specialize=PLAIN)
def coefficient_kernel(
    stats_ptr,
    slots_ptr,
    num_slots: tl.int64,
    divisor: tl.int64,
    max_norm: tl.int64,
    MAXIMA: tl.constexpr,
):
    begin = num_slots.to(tl.int64) * 0
    total = fold(slots_ptr, begin, begin + num_slots, MAXIMA)
    divisor, max_norm = double(divisor), double(max_norm)
    if not MAXIMA:
        total = square_root(total)
    norm = total / divisor
    # torch's rule: min(1, max_norm / (norm + 1e-6)), where a NaN norm gives a NaN factor.
    ratio = tl.where(max_norm < float("inf"), max_norm / (norm + 1e-6), 1.0)
    clip = tl.where(ratio >= 1.0, 1.0, ratio)
    tl.store(stats_ptr, norm)
    tl.store(stats_ptr + 1, clip / divisor)
    tl.store(stats_ptr + 2, clip)


@triton.jit
def accumulate_block(
    accumulator_ptr, grad_ptr, mask, GRAD: tl.constexpr, ACCUMULATOR: tl.constexpr,
    STORE: tl.constexpr,
):  # fmt: skip
    """Moves a block of sums; its squares as they are then, of the gradient, and as they were."""
    fresh = widen(tl.load(grad_ptr, mask=mask), GRAD)
    prior = fresh
    total = fresh
    if not STORE:
        prior = widen(tl.load(accumulator_ptr, mask=mask), ACCUMULATOR)
        total = prior + fresh
    raw = narrow(total, ACCUMULATOR)
    tl.store(accumulator_ptr, raw, mask=mask)
    return square(widen(raw, ACCUMULATOR)), square(fresh), square(prior)


@triton.jit(do_not_specialize=PLAIN)
def accumulate_kernel(
    slots_ptr,
    grad_slots_ptr,
    prior_slots_ptr,
    chunks_ptr,
    num_elements_ptr,
    addresses_ptr,
    num_rows: tl.int64,
    first_chunk: tl.int64,
    GRAD: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    STORE: tl.constexpr,
    SUMS: tl.constexpr,
    GRAD_SUMS: tl.constexpr,
    PRIOR_SUMS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Reads 8 bytes an element and writes 4 (fp32); squares that nobody wants are not taken."""
    row, begin, left, slot, _ = find_span(chunks_ptr, num_elements_ptr, first_chunk, CHUNK)
    accumulator_ptr = find_column(
        addresses_ptr, num_rows, row, begin, ACCUMULATOR_COLUMN, ACCUMULATOR, ALIGNED
    )
    grad_ptr = find_column(addresses_ptr, num_rows, row, begin, GRAD_COLUMN, GRAD, ALIGNED)
    offs = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float64)
    grad_squares = tl.zeros([BLOCK], tl.float64)
    prior_squares = tl.zeros([BLOCK], tl.float64)
    full = left // BLOCK * BLOCK
    for i in range(0, full, BLOCK):
        now, grad, prior = accumulate_block(
            accumulator_ptr + i + offs, grad_ptr + i + offs, None, GRAD, ACCUMULATOR, STORE
        )
        squares += now
        grad_squares += grad
        prior_squares += prior
    if full < left:
        mask = full + offs < left
        now, grad, prior = accumulate_block(
            accumulator_ptr + full + offs, grad_ptr + full + offs, mask, GRAD, ACCUMULATOR, STORE
        )
        squares += tl.where(mask, now, 0.0)
        grad_squares += tl.where(mask, grad, 0.0)
        prior_squares += tl.where(mask, prior, 0.0)
    if SUMS:
        tl.store(slots_ptr + slot, sum_pairs(squares))
    if GRAD_SUMS:
        tl.store(grad_slots_ptr + slot, sum_pairs(grad_squares))
    if PRIOR_SUMS:
        tl.store(prior_slots_ptr + slot, 0.0 if STORE else sum_pairs(prior_squares))


@triton.jit(do_not_specialize=PLAIN)
def scale_kernel(
    stats_ptr,
    chunks_ptr,
    num_elements_ptr,
    addresses_ptr,
    num_rows: tl.int64,
    first_chunk: tl.int64,
    ACCUMULATOR: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    row, begin, left, _, _ = find_span(chunks_ptr, num_elements_ptr, first_chunk, BLOCK)
    x_ptr = find_column(
        addresses_ptr, num_rows, row, begin, ACCUMULATOR_COLUMN, ACCUMULATOR, ALIGNED
    )
    offs = tl.arange(0, BLOCK)
    factor = tl.load(stats_ptr + 1)
    for masked in tl.static_range(2):
        mask = (offs < left) if masked else None
        if is_mine(left, masked):
            x = widen(tl.load(x_ptr + offs, mask=mask), ACCUMULATOR)
            x = narrow(x * factor.to(x.dtype), ACCUMULATOR)
            tl.store(x_ptr + offs, x, mask=mask)
