"""How Triton kernels read, round, store and average parameters: csrc/cuda/weights.h."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-not-found,import-untyped"
# ruff: noqa: SIM108, SIM300  (Triton's compiler takes branches, and constants on the right)

import triton
import triton.language as tl

from .device_table import COLUMNS
from .triton_elements import (
    double,
    find_chunk_key,
    find_column,
    find_random_bits,
    join,
    narrow,
    narrow_stochastically,
    split,
    widen,
)

__all__ = ["find_bits", "find_weights", "load_weights", "move_average", "store_weights"]

PARAM_COLUMN = tl.constexpr(COLUMNS.index("PARAM"))
MASTER_COLUMN = tl.constexpr(COLUMNS.index("MASTER"))
AVERAGE_COLUMN = tl.constexpr(COLUMNS.index("AVERAGE"))


@triton.jit
def find_weights(
    addresses_ptr,
    num_rows,
    row,
    begin,
    PARAM: tl.constexpr,
    MASTERS: tl.constexpr,
    AVERAGES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Parameter, master and average of a row from `begin`; the parameter where there is none."""
    param_ptr = find_column(addresses_ptr, num_rows, row, begin, PARAM_COLUMN, PARAM, ALIGNED)
    master_ptr = param_ptr
    average_ptr = param_ptr
    if MASTERS:
        kept: tl.constexpr = tl.int16 if PARAM == tl.bfloat16 else tl.float32
        master_ptr = find_column(addresses_ptr, num_rows, row, begin, MASTER_COLUMN, kept, ALIGNED)
    if AVERAGES:
        real: tl.constexpr = tl.float64 if PARAM == tl.float64 else tl.float32
        average_ptr = find_column(
            addresses_ptr, num_rows, row, begin, AVERAGE_COLUMN, real, ALIGNED
        )
    return param_ptr, master_ptr, average_ptr


@triton.jit
def load_weights(param_ptr, master_ptr, mask, PARAM: tl.constexpr, MASTERS: tl.constexpr):
    """What parameters are worth."""
    if not MASTERS:
        p = widen(tl.load(param_ptr, mask=mask), PARAM)
    elif PARAM == tl.bfloat16:
        p = join(tl.load(param_ptr, mask=mask), tl.load(master_ptr, mask=mask))
    else:
        p = tl.load(master_ptr, mask=mask)
    return p


@triton.jit
def find_bits(rounding_key, slot, index, STOCHASTIC: tl.constexpr):
    """32 random bits an element, where they are wanted."""
    if STOCHASTIC:
        bits = find_random_bits(find_chunk_key(rounding_key, slot), index)
    else:
        bits = index
    return bits


@triton.jit
def store_weights(
    param_ptr,
    master_ptr,
    p,
    mask,
    bits,
    PARAM: tl.constexpr,
    MASTERS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Stores parameters; what they are worth now."""
    if MASTERS:
        if PARAM == tl.bfloat16:
            raw, master = split(p)
        else:
            raw, master = narrow(p, PARAM), p
        tl.store(master_ptr, master, mask=mask)
        stored = p
    else:
        if STOCHASTIC:
            raw = narrow_stochastically(p, bits, PARAM)
        else:
            raw = narrow(p, PARAM)
        stored = widen(raw, PARAM)
    tl.store(param_ptr, raw, mask=mask)
    return stored


@triton.jit
def move_average(average_ptr, p, mask, weight):
    """Where the two are equal nothing moves: a mask of -inf stays one, since -inf - -inf is NaN."""
    average = tl.load(average_ptr, mask=mask)
    moved = average + double(weight).to(p.dtype) * (p - average)
    tl.store(average_ptr, tl.where(p == average, average, moved), mask=mask)
