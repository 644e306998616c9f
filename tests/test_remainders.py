"""Remainders: a bf16 and the 16 bits that it lacks are an fp32 number, in Python and in C++."""

import math

import pytest
import torch
from fused import (
    LOW_BITS,
    PLAIN_SGD,
    Rows,
    every_upper_half,
    in_every_way,
    neighbours,
    sgd,
)
from tensors import BACKENDS, clones
from tolerance import assert_all_bit_equal, assert_bit_equal, bits

from stepclock_ext import ops

each_backend = pytest.mark.parametrize("backend", BACKENDS)
STILL = {**PLAIN_SGD, "lr": 0.0}


def rows_of(backend, values):
    """One row of bf16 with remainders that is worth `values`, and sums of nothing."""
    half, remainder = ops.split(values)
    sums = [torch.zeros_like(values)]
    layout = ops.Layout.of(ops.make_backend(backend), [half], accumulate_dtype=torch.float32)
    return Rows(layout, [half], sums, [], [], [], masters=[remainder])


def as_fp32(pattern):
    return torch.tensor([pattern - 2**32 * (pattern >> 31)], dtype=torch.int32).view(torch.float32)


def test_splitting_and_joining_gives_back_the_bits_of_every_number():
    values = every_upper_half()
    assert values.numel() == 2**16 * len(LOW_BITS)
    joined = ops.join(*ops.split(values))
    numbers = ~values.isnan()
    assert torch.equal(bits(joined)[numbers], bits(values)[numbers])


def test_splitting_and_joining_gives_back_the_bits_of_random_numbers():
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(2**31), 2**31, (300_000,), generator=generator)
    values = patterns.to(torch.int32).view(torch.float32)
    joined = ops.join(*ops.split(values))
    numbers = ~values.isnan()
    assert torch.equal(bits(joined)[numbers], bits(values)[numbers])


def test_a_nan_stays_a_nan_of_its_sign_in_the_half_and_in_the_pair():
    values = every_upper_half()
    values = values[values.isnan()]
    half, remainder = ops.split(values)
    joined = ops.join(half, remainder)
    assert half.isnan().all()
    assert joined.isnan().all()
    assert torch.equal(bits(half) < 0, bits(values) < 0)
    assert torch.equal(bits(joined) < 0, bits(values) < 0)
    assert not remainder.any()


def test_the_half_is_the_nearest_bf16_with_ties_away_from_zero():
    values = every_upper_half()
    values = values[values.isfinite()]
    below, above = neighbours(values, torch.bfloat16)
    wide = values.double()
    to_below, to_above = wide - below, above - wide  # exact: numbers of 24 bits, gaps of 16
    outer_is_above = wide > 0
    takes_above = (to_above < to_below) | ((to_above == to_below) & outer_is_above)
    expected = torch.where(takes_above, above, below).to(torch.bfloat16)
    half = ops.split(values)[0]
    assert torch.equal(half, expected)
    assert torch.equal(half.signbit(), values.signbit())


@pytest.mark.parametrize("sign", [1, -1])
def test_a_tie_below_an_even_number_and_one_above_both_leave_zero(sign):
    ties = sign * torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8])
    half, remainder = ops.split(ties)
    assert half.tolist() == [sign * (1 + 2.0**-7), sign * (1 + 2.0**-6)]
    assert remainder.tolist() == [-(2**15)] * 2
    assert torch.equal(ops.join(half, remainder), ties)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_finite_number_whose_half_is_infinite_stays_finite_in_the_pair(sign):
    largest = sign * torch.tensor([torch.finfo(torch.float32).max, math.inf])
    half, remainder = ops.split(largest)
    assert half.tolist() == [sign * math.inf] * 2
    assert remainder.tolist() == [-1, 0]
    assert torch.equal(ops.join(half, remainder), largest)
    edge = as_fp32(0x7F7F7FFF) * sign  # the last one that bf16 holds as finite
    assert ops.split(edge)[0].item() == sign * torch.finfo(torch.bfloat16).max


@pytest.mark.parametrize(
    ("pattern", "half", "remainder"),
    [
        (0x00000001, 0x0000, 1),
        (0x00007FFF, 0x0000, 2**15 - 1),
        (0x00008000, 0x0001, -(2**15)),
        (0x007FFFFF, 0x0080, -1),
        (0x80000000, 0x8000, 0),
        (0x80000001, 0x8000, 1),
        (0x8000FFFF, 0x8001, -1),
        (0x3F80FFFF, 0x3F81, -1),
    ],
)
def test_zeros_and_subnormals_are_split_by_the_same_rule(pattern, half, remainder):
    value = as_fp32(pattern)
    got_half, got_remainder = ops.split(value)
    assert bits(got_half).item() & 0xFFFF == half
    assert got_remainder.item() == remainder
    assert torch.equal(bits(ops.join(got_half, got_remainder)), bits(value))


def test_split_and_join_pair_elements_whatever_the_strides():
    values = every_upper_half()[: 2 * 3 * 50 * 20].reshape(2, 3, 50, 20)
    strided = values.to(memory_format=torch.channels_last)
    half, remainder = ops.split(strided)
    assert_bit_equal(half, ops.split(values)[0])
    assert_bit_equal(remainder, ops.split(values)[1])
    strided_half = half.to(memory_format=torch.channels_last)
    assert_bit_equal(ops.join(strided_half, remainder), ops.join(half, remainder))


@each_backend
def test_an_update_that_changes_nothing_leaves_every_pair_as_it_was(backend):
    rows = rows_of(backend, every_upper_half())
    half, remainder = clones([rows.params[0], rows.masters[0]])
    sgd(rows, STILL)
    numbers = ~half.isnan()
    assert torch.equal(bits(rows.params[0])[numbers], bits(half)[numbers])  # zeros keep their sign
    assert torch.equal(rows.masters[0], remainder)
    assert rows.params[0][~numbers].isnan().all()


@each_backend
def test_an_update_splits_every_number_that_it_arrives_at(backend):
    values = every_upper_half()
    rows = rows_of(backend, torch.zeros_like(values))
    rows.sums[0] = values.clone()
    sgd(rows, {**STILL, "lr": 1.0}, coefficient=-1.0)  # 0 - 1 * -x
    half, remainder = ops.split(0 - (-values))
    assert_bit_equal(rows.params[0], half)
    assert torch.equal(rows.masters[0], remainder)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the kernels were not built")
def test_threads_and_instruction_sets_split_and_join_alike():
    values = every_upper_half()[::5]

    def run():
        rows = rows_of("cpu", values)
        rows.sums[0] = values.roll(4099)
        sgd(rows, {**PLAIN_SGD, "lr": 1.0}, coefficient=0.25)
        return rows.written()

    results = in_every_way(run)
    for other in results[1:]:
        assert_all_bit_equal(other, results[0])
    expected = values - values.roll(4099) * 0.25
    assert_all_bit_equal(results[0], ops.split(expected))


@each_backend
def test_steps_too_small_for_bf16_add_up(backend):
    rows = rows_of(backend, torch.ones(3))
    rows.sums[0].fill_(1.0)
    for _ in range(64):
        sgd(rows, {**PLAIN_SGD, "lr": 2.0**-13}, coefficient=1.0)
    assert ops.join(rows.params[0], rows.masters[0]).tolist() == [1 - 2.0**-7] * 3
    assert rows.params[0].tolist() == [1 - 2.0**-7] * 3
