"""The Triton kernels of Adam, SGD and the averages: csrc/cuda/update.cu.

Bytes an element: AdamW fp32 28; bf16 beside fp32 sums and moments 24, 28 with remainders; 8 more
with an fp32 average. Launched without fused multiply-add: the bits are those of the CPU.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-not-found,import-untyped"
# ruff: noqa: SIM108, SIM300  (Triton's compiler takes branches, and constants on the right)

import triton
import triton.language as tl

from .device_table import COLUMNS
from .triton_elements import (
    BLOCK,
    PLAIN,
    divide,
    double,
    find_column,
    find_span,
    is_mine,
    is_open,
    narrow,
    square_root,
    widen,
)
from .triton_weights import find_bits, find_weights, load_weights, move_average, store_weights

__all__ = ["adam_kernel", "advance_steps_kernel", "move_average_kernel", "sgd_kernel"]

ACCUMULATOR_COLUMN = tl.constexpr(COLUMNS.index("ACCUMULATOR"))
EXP_AVG_COLUMN = tl.constexpr(COLUMNS.index("EXP_AVG"))
EXP_AVG_SQ_COLUMN = tl.constexpr(COLUMNS.index("EXP_AVG_SQ"))
MAX_EXP_AVG_SQ_COLUMN = tl.constexpr(COLUMNS.index("MAX_EXP_AVG_SQ"))
BUFFER_COLUMN = tl.constexpr(COLUMNS.index("BUFFER"))
STEP_COLUMN = tl.constexpr(COLUMNS.index("STEP"))
ROWS = tl.constexpr(256)  # of one program that advances steps


@triton.jit
def find_power(t, log_beta, log_beta_rest):
    """beta**t; t times the upper 24 bits of the logarithm is exact."""
    power = tl.exp(t * double(log_beta))
    return power + power * (t * double(log_beta_rest))


@triton.jit(do_not_specialize=PLAIN)
def advance_steps_kernel(
    steps_ptr,
    addresses_ptr,
    stats_ptr,
    num_rows: tl.int64,
    lr: tl.int64,
    log_beta1: tl.int64,
    log_beta1_rest: tl.int64,
    log_beta2: tl.int64,
    log_beta2_rest: tl.int64,
    GATED: tl.constexpr,
):
    """Adds 1 to each row's step; writes lr / (1 - beta1**t) and 1 / sqrt(1 - beta2**t)."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = rows < tl.where(is_open(stats_ptr, GATED), num_rows, 0)
    address = tl.load(addresses_ptr + num_rows * STEP_COLUMN + rows, mask=mask, other=0)
    step_ptr = address.to(tl.pointer_type(tl.float32))
    now = tl.load(step_ptr, mask=mask, other=0.0) + 1.0
    tl.store(step_ptr, now, mask=mask)
    t = now.to(tl.float64)
    size = double(lr) / (1.0 - find_power(t, log_beta1, log_beta1_rest))
    inv_root = 1.0 / tl.sqrt(1.0 - find_power(t, log_beta2, log_beta2_rest))
    tl.store(steps_ptr + rows * 2, size, mask=mask)
    tl.store(steps_ptr + rows * 2 + 1, inv_root, mask=mask)


@triton.jit
def find_coefficient(stats_ptr, MAXIMIZE: tl.constexpr):
    coefficient = tl.load(stats_ptr + 1)
    if MAXIMIZE:
        coefficient = -coefficient
    return coefficient


@triton.jit(do_not_specialize=PLAIN)
def adam_kernel(
    steps_ptr,
    stats_ptr,
    chunks_ptr,
    num_elements_ptr,
    addresses_ptr,
    num_rows: tl.int64,
    first_chunk: tl.int64,
    eps: tl.int64,
    decay: tl.int64,
    beta2: tl.int64,
    grad_weight: tl.int64,
    square_weight: tl.int64,
    average_weight: tl.int64,
    rounding_key: tl.int64,
    PARAM: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    STATE: tl.constexpr,
    DECOUPLED: tl.constexpr,
    AMSGRAD: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    MASTERS: tl.constexpr,
    AVERAGES: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    GATED: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    row, begin, left, slot, offset = find_span(chunks_ptr, num_elements_ptr, first_chunk, BLOCK)
    left = tl.where(is_open(stats_ptr, GATED), left, 0)
    w, master, average = find_weights(
        addresses_ptr, num_rows, row, begin, PARAM, MASTERS, AVERAGES, ALIGNED
    )
    table = addresses_ptr
    g = find_column(table, num_rows, row, begin, ACCUMULATOR_COLUMN, ACCUMULATOR, ALIGNED)
    m = find_column(table, num_rows, row, begin, EXP_AVG_COLUMN, STATE, ALIGNED)
    v = find_column(table, num_rows, row, begin, EXP_AVG_SQ_COLUMN, STATE, ALIGNED)
    most = v
    if AMSGRAD:
        most = find_column(table, num_rows, row, begin, MAX_EXP_AVG_SQ_COLUMN, STATE, ALIGNED)
    real: tl.constexpr = tl.float64 if PARAM == tl.float64 else tl.float32
    coefficient = find_coefficient(stats_ptr, MAXIMIZE).to(real)
    step_size = tl.load(steps_ptr + row * 2).to(real)
    inv_sqrt_bias2 = tl.load(steps_ptr + row * 2 + 1).to(real)
    eps, decay, beta2 = double(eps).to(real), double(decay).to(real), double(beta2).to(real)
    grad_weight, square_weight = double(grad_weight).to(real), double(square_weight).to(real)
    offs = tl.arange(0, BLOCK)
    for masked in tl.static_range(2):
        mask = (offs < left) if masked else None
        if is_mine(left, masked):
            p = load_weights(w + offs, master + offs, mask, PARAM, MASTERS)
            grad = widen(tl.load(g + offs, mask=mask), ACCUMULATOR) * coefficient
            exp_avg = widen(tl.load(m + offs, mask=mask), STATE)
            exp_avg_sq = widen(tl.load(v + offs, mask=mask), STATE)
            if DECOUPLED:
                p = p * decay
            else:
                grad = grad + decay * p
            exp_avg = exp_avg + grad_weight * (grad - exp_avg)
            exp_avg_sq = exp_avg_sq * beta2 + square_weight * grad * grad
            second = exp_avg_sq
            if AMSGRAD:
                largest = widen(tl.load(most + offs, mask=mask), STATE)
                # A NaN on either side stays: it must not read as "smaller".
                grows = (exp_avg_sq > largest) | (exp_avg_sq != exp_avg_sq)
                second = tl.where(grows, exp_avg_sq, largest)
                tl.store(most + offs, narrow(second, STATE), mask=mask)
            tl.store(m + offs, narrow(exp_avg, STATE), mask=mask)
            tl.store(v + offs, narrow(exp_avg_sq, STATE), mask=mask)
            root = square_root(second) * inv_sqrt_bias2
            p = p - divide(step_size * exp_avg, root + eps)
            bits = find_bits(rounding_key, slot, offset + offs, STOCHASTIC)
            p = store_weights(w + offs, master + offs, p, mask, bits, PARAM, MASTERS, STOCHASTIC)
            if AVERAGES:
                move_average(average + offs, p, mask, average_weight)


@triton.jit(do_not_specialize=PLAIN)
def sgd_kernel(
    stats_ptr,
    chunks_ptr,
    num_elements_ptr,
    addresses_ptr,
    num_rows: tl.int64,
    first_chunk: tl.int64,
    lr: tl.int64,
    decay: tl.int64,
    momentum: tl.int64,
    grad_weight: tl.int64,
    average_weight: tl.int64,
    rounding_key: tl.int64,
    PARAM: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    STATE: tl.constexpr,
    DECAY: tl.constexpr,
    MOMENTUM: tl.constexpr,
    FIRST: tl.constexpr,
    NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    MASTERS: tl.constexpr,
    AVERAGES: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    GATED: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    row, begin, left, slot, offset = find_span(chunks_ptr, num_elements_ptr, first_chunk, BLOCK)
    left = tl.where(is_open(stats_ptr, GATED), left, 0)
    w, master, average = find_weights(
        addresses_ptr, num_rows, row, begin, PARAM, MASTERS, AVERAGES, ALIGNED
    )
    g = find_column(addresses_ptr, num_rows, row, begin, ACCUMULATOR_COLUMN, ACCUMULATOR, ALIGNED)
    b = g
    if MOMENTUM:
        b = find_column(addresses_ptr, num_rows, row, begin, BUFFER_COLUMN, STATE, ALIGNED)
    real: tl.constexpr = tl.float64 if PARAM == tl.float64 else tl.float32
    coefficient = find_coefficient(stats_ptr, MAXIMIZE).to(real)
    lr, decay = double(lr).to(real), double(decay).to(real)
    momentum, grad_weight = double(momentum).to(real), double(grad_weight).to(real)
    offs = tl.arange(0, BLOCK)
    for masked in tl.static_range(2):
        mask = (offs < left) if masked else None
        if is_mine(left, masked):
            p = load_weights(w + offs, master + offs, mask, PARAM, MASTERS)
            grad = widen(tl.load(g + offs, mask=mask), ACCUMULATOR) * coefficient
            if DECAY:  # else 0 * inf would turn a mask of -inf into NaN
                grad = grad + decay * p
            if MOMENTUM:
                buffer = grad
                if not FIRST:
                    prior = widen(tl.load(b + offs, mask=mask), STATE)
                    buffer = prior * momentum + grad_weight * grad
                tl.store(b + offs, narrow(buffer, STATE), mask=mask)
                if NESTEROV:
                    grad = grad + momentum * buffer
                else:
                    grad = buffer
            p = p - lr * grad
            bits = find_bits(rounding_key, slot, offset + offs, STOCHASTIC)
            p = store_weights(w + offs, master + offs, p, mask, bits, PARAM, MASTERS, STOCHASTIC)
            if AVERAGES:
                move_average(average + offs, p, mask, average_weight)


@triton.jit(do_not_specialize=PLAIN)
def move_average_kernel(
    stats_ptr,
    chunks_ptr,
    num_elements_ptr,
    addresses_ptr,
    num_rows: tl.int64,
    first_chunk: tl.int64,
    average_weight: tl.int64,
    PARAM: tl.constexpr,
    MASTERS: tl.constexpr,
    GATED: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    row, begin, left, _, _ = find_span(chunks_ptr, num_elements_ptr, first_chunk, BLOCK)
    left = tl.where(is_open(stats_ptr, GATED), left, 0)
    w, master, average = find_weights(
        addresses_ptr, num_rows, row, begin, PARAM, MASTERS, True, ALIGNED
    )
    offs = tl.arange(0, BLOCK)
    for masked in tl.static_range(2):
        mask = (offs < left) if masked else None
        if is_mine(left, masked):
            p = load_weights(w + offs, master + offs, mask, PARAM, MASTERS)
            move_average(average + offs, p, mask, average_weight)
