"""What the Triton kernels are made of: csrc's arithmetic of an element, and the walk over a table.

bf16 is taken as bits, since its rounding differs between Triton's targets. Numbers of fp64 travel
as int64 bits: Triton makes fp32 of a float.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-not-found,import-untyped"
# ruff: noqa: SIM108, SIM300  (Triton's compiler takes branches, and constants on the right)

import triton
import triton.language as tl

from .layout import CHUNK_ELEMENTS

__all__ = [
    "BLOCK",
    "CHUNK",
    "PLAIN",
    "divide",
    "double",
    "find_chunk_key",
    "find_column",
    "find_random_bits",
    "find_span",
    "is_mine",
    "is_open",
    "join",
    "narrow",
    "narrow_stochastically",
    "split",
    "square_root",
    "widen",
]

CHUNK = tl.constexpr(CHUNK_ELEMENTS)
# What a program works on at once. Eight warps take eight values each: one vector of 16 bits, two of
# 32. Where both are in play 16 warps take four each: vectors of eight values of 32 bits are stored
# by way of shared memory.
BLOCK = tl.constexpr(2048)
VECTOR_BYTES = tl.constexpr(16)

# Arguments of which no value deserves a kernel of its own: one kernel for each choice of CAPITALS.
PLAIN = [
    *("slots_ptr", "grad_slots_ptr", "prior_slots_ptr", "partials_ptr", "stats_ptr", "steps_ptr"),
    *("chunks_ptr", "num_elements_ptr", "addresses_ptr", "num_rows", "first_chunk", "num_slots"),
    *("slots_per_program", "divisor", "max_norm", "lr", "eps", "decay", "beta2", "grad_weight"),
    *("square_weight", "momentum", "average_weight", "rounding_key"),
    *("log_beta1", "log_beta1_rest", "log_beta2", "log_beta2_rest"),
]


@triton.jit
def double(bits):
    """The fp64 number that was passed as its bits."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def widen(raw, DTYPE: tl.constexpr):
    if DTYPE == tl.bfloat16:
        wide = (raw.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif DTYPE == tl.float16:
        wide = raw.to(tl.float32)
    else:
        wide = raw
    return wide


@triton.jit
def narrow(wide, DTYPE: tl.constexpr):
    """What memory holds for `wide`: to nearest, ties to even."""
    if DTYPE == tl.bfloat16:
        bits = wide.to(tl.uint32, bitcast=True)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        raw = (tl.where(is_nan, bits | 0x00400000, rounded) >> 16).to(tl.uint16)
    elif DTYPE == tl.float16:
        raw = wide.to(tl.float16)
    else:
        raw = wide
    return raw


@triton.jit
def divide(a, b):
    if a.dtype == tl.float64:
        quotient = a / b
    else:
        quotient = tl.div_rn(a, b)
    return quotient


@triton.jit
def square_root(x):
    if x.dtype == tl.float64:
        root = tl.sqrt(x)
    else:
        root = tl.sqrt_rn(x)
    return root


@triton.jit
def split(wide):
    """The nearest bf16, ties away from zero, and the 16 bits that it lacks; both as bits."""
    bits = wide.to(tl.uint32, bitcast=True)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    bits = tl.where(is_nan, (bits & 0x80000000) | 0x7FC00000, bits)
    half = ((bits + 0x8000) >> 16).to(tl.uint16)
    return half, bits.to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def join(half, remainder):
    bits = (half.to(tl.uint32) << 16) + remainder.to(tl.int32).to(tl.uint32, bitcast=True)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def find_chunk_key(rounding_key, slot):
    """32 bits that name a chunk in an update: splitmix64 (Steele et al. 2014)."""
    key = rounding_key.to(tl.int64).to(tl.uint64, bitcast=True)
    z = key + slot.to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return ((z ^ (z >> 31)) >> 32).to(tl.uint32)


@triton.jit
def find_random_bits(key, index):
    """A Weyl sequence through the finalizer of MurmurHash3 (Appleby 2011)."""
    h = index.to(tl.uint32) * 0x9E3779B9 + key
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def narrow_stochastically(wide, random, DTYPE: tl.constexpr):
    """What memory holds: up or down, with the probability that keeps the mean."""
    bits = wide.to(tl.uint32, bitcast=True)
    value = bits & 0x7FFFFFFF
    is_nan = value > 0x7F800000
    if DTYPE == tl.bfloat16:
        kept = tl.where(is_nan, bits | 0x00400000, bits + (random >> 16))
        raw = (kept >> 16).to(tl.uint16)
    else:
        noise = random >> 19
        is_small = value < 0x38800000  # below 2**-14 the result counts units of 2**-24
        units = tl.where(is_small, value, 0).to(tl.float32, bitcast=True) * 16777216.0
        small = (units + noise.to(tl.float32) * 0.0001220703125).to(tl.int32)
        normal = (value - 0x38000000 + noise) >> 13
        half = tl.where(is_small, small.to(tl.uint32, bitcast=True), normal)
        half = tl.where(value >= 0x47800000, 0x7C00, half)
        half = tl.where(is_nan, 0x7E00, half)
        raw = (((bits >> 16) & 0x8000) | half).to(tl.uint16).to(tl.float16, bitcast=True)
    return raw


@triton.jit
def find_span(chunks_ptr, num_elements_ptr, first_chunk, SIZE: tl.constexpr):
    """Row, first element, elements that are left from there, slot and place in the chunk."""
    program = tl.program_id(0).to(tl.int64)
    parts = CHUNK // SIZE
    chunk_ptr = chunks_ptr + (program // parts + first_chunk) * 3
    row = tl.load(chunk_ptr)
    offset = program % parts * SIZE
    begin = tl.multiple_of(tl.load(chunk_ptr + 1), CHUNK) + offset
    left = tl.minimum(tl.load(num_elements_ptr + row) - begin, SIZE)
    return row, begin, left, tl.load(chunk_ptr + 2), offset


@triton.jit
def find_column(
    addresses_ptr,
    num_rows,
    row,
    begin,
    COLUMN: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Points at element `begin` of a row; bf16 as bits."""
    address = tl.load(addresses_ptr + num_rows * COLUMN + row)
    raw: tl.constexpr = tl.uint16 if DTYPE == tl.bfloat16 else DTYPE
    row_ptr = address.to(tl.pointer_type(raw))
    if ALIGNED:
        row_ptr = tl.multiple_of(row_ptr, VECTOR_BYTES)
    return row_ptr + begin


@triton.jit
def is_open(stats_ptr, GATED: tl.constexpr):
    """Whether an update may happen: a gated one does nothing where the norm is not finite."""
    if GATED:
        opened = tl.abs(tl.load(stats_ptr)) < float("inf")
    else:
        opened = tl.program_id(0) >= 0
    return opened


@triton.jit
def is_mine(left, MASKED: tl.constexpr):
    """Whether a block is the masked pass's: full ones need no mask, which would cost vectors."""
    if MASKED:
        mine = (left > 0) & (left < BLOCK)
    else:
        mine = left >= BLOCK
    return mine
