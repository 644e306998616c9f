"""The ops on gradients: sums of squares, maxima, accumulation, coefficient, scaling."""

import math

import pytest
import torch
from tensors import (
    BACKENDS,
    DTYPES,
    SIZES,
    clones,
    coefficient_stats,
    dtype_name,
    interleaved_sizes,
    layout_of,
    memory_order,
    random_list,
)
from tolerance import assert_all_bit_equal, assert_bit_equal, assert_close, assert_near

from stepclock_ext import ops

each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
each_alignment = pytest.mark.parametrize("unaligned", [False, True], ids=["aligned", "unaligned"])
UNTOUCHED = -7.0  # no sum of squares


def chunk_values(tensors, reduce):
    """fp64 `reduce` of each chunk of each tensor, as `SIZES` of slots are cut."""
    chunks = [c for t in tensors for c in memory_order(t).split(ops.CHUNK_ELEMENTS) if c.numel()]
    return torch.stack([reduce(chunk) for chunk in chunks])


def sum_of_squares(chunk):
    return torch.tensor(math.fsum(chunk.square().tolist()), dtype=torch.float64)


def strided_list(dtype, seed=0):
    """Dense tensors whose memory order is not their index order."""
    image, matrix, cube = random_list([2 * 3 * 40 * 110, 6 * 20, 2 * 3 * 4], dtype, seed=seed)
    return [
        image.reshape(2, 3, 40, 110).to(memory_format=torch.channels_last),
        matrix.reshape(6, 20).t(),
        cube.reshape(2, 3, 4).permute(2, 0, 1),
    ]


@each_backend
@each_dtype
@each_alignment
def test_every_slot_is_its_chunks_sum_of_squares(backend, dtype, unaligned):
    tensors = random_list(SIZES, dtype, unaligned=unaligned)
    layout = layout_of(backend, tensors)
    slots = ops.make_slots(layout.num_slots)
    ops.sum_squares_(slots, tensors, layout)
    expected = chunk_values(tensors, sum_of_squares)
    assert_close(slots / expected, torch.ones_like(expected), num_roundings=ops.CHUNK_ELEMENTS)


@each_backend
@each_dtype
@each_alignment
def test_every_slot_is_its_chunks_largest_magnitude(backend, dtype, unaligned):
    tensors = random_list(SIZES, dtype, unaligned=unaligned)
    layout = layout_of(backend, tensors)
    slots = ops.make_slots(layout.num_slots)
    ops.max_abs_(slots, tensors, layout)
    assert_bit_equal(slots, chunk_values(tensors, lambda chunk: chunk.abs().max()))


@each_backend
@pytest.mark.parametrize("op", [ops.sum_squares_, ops.max_abs_])
def test_slots_of_other_rows_are_left_alone(backend, op):
    tensors = random_list([16385, 0, 3], torch.float32)
    first_slots = [4, 1, 9]
    layout = ops.Layout.of(ops.make_backend(backend), tensors, first_slots)
    slots = torch.full((12,), UNTOUCHED, dtype=torch.float64)
    op(slots, tensors, layout)
    written = [i for i, value in enumerate(slots.tolist()) if value != UNTOUCHED]
    assert layout.num_slots == 10
    assert written == [4, 5, 9]


@each_backend
@each_dtype
def test_chunks_follow_memory_whatever_the_strides(backend, dtype):
    tensors = strided_list(dtype)
    layout = layout_of(backend, tensors)
    slots, maxima = ops.make_slots(layout.num_slots), ops.make_slots(layout.num_slots)
    ops.sum_squares_(slots, tensors, layout)
    ops.max_abs_(maxima, tensors, layout)
    expected = chunk_values(tensors, sum_of_squares)
    assert_close(slots / expected, torch.ones_like(expected), num_roundings=ops.CHUNK_ELEMENTS)
    assert_bit_equal(maxima, chunk_values(tensors, lambda chunk: chunk.abs().max()))


@each_backend
@each_dtype
@each_alignment
def test_accumulating_is_torchs_own_addition_to_the_bit(backend, dtype, unaligned):
    accumulators = random_list(SIZES, dtype, seed=1, unaligned=unaligned)
    grads = random_list(SIZES, dtype, seed=2)
    expected = [a + g for a, g in zip(accumulators, grads, strict=True)]
    ops.accumulate_(accumulators, grads, layout_of(backend, grads))
    assert_all_bit_equal(accumulators, expected)


@each_backend
@each_dtype
@each_alignment
def test_storing_copies_the_bits_and_does_not_read_what_was_there(backend, dtype, unaligned):
    grads = random_list(SIZES, dtype, seed=2, unaligned=unaligned)
    accumulators = [torch.full_like(g, math.nan) for g in grads]
    layout = layout_of(backend, grads)
    slots, expected = ops.make_slots(layout.num_slots), ops.make_slots(layout.num_slots)
    ops.accumulate_(accumulators, grads, layout, slots=slots, store=True)
    ops.sum_squares_(expected, grads, layout)
    assert_all_bit_equal(accumulators, grads)
    assert_bit_equal(slots, expected)


@each_backend
@each_dtype
@each_alignment
def test_the_sums_of_an_accumulation_are_those_of_a_later_read_to_the_bit(
    backend, dtype, unaligned
):
    accumulators = random_list(SIZES, dtype, seed=1, unaligned=unaligned)
    grads = random_list(SIZES, dtype, seed=2)
    layout = layout_of(backend, grads)
    slots, expected = ops.make_slots(layout.num_slots), ops.make_slots(layout.num_slots)
    ops.accumulate_(accumulators, grads, layout, slots=slots)
    ops.sum_squares_(expected, accumulators, layout)
    assert_bit_equal(slots, expected)


@each_backend
@each_dtype
def test_accumulating_and_scaling_pair_elements_whatever_the_strides(backend, dtype):
    accumulators, grads = strided_list(dtype, seed=1), strided_list(dtype, seed=2)
    layout = layout_of(backend, grads)
    expected = [a + g for a, g in zip(accumulators, grads, strict=True)]
    ops.accumulate_(accumulators, grads, layout)
    assert_all_bit_equal(accumulators, expected)
    ops.scale_(grads, coefficient_stats(-2.0), layout)
    assert_all_bit_equal(grads, [g * -2 for g in strided_list(dtype, seed=2)])


@each_backend
@each_dtype
@each_alignment
def test_scaling_is_one_multiplication_rounded_once(backend, dtype, unaligned):
    tensors = random_list(SIZES, dtype, unaligned=unaligned)
    before = [ops.real_view(t) for t in clones(tensors)]
    ops.scale_(tensors, coefficient_stats(-1 / 3), layout_of(backend, tensors))
    wide = torch.promote_types(before[0].dtype, torch.float32)
    factor = torch.tensor(-1 / 3, dtype=wide)
    for tensor, old in zip(map(ops.real_view, tensors), before, strict=True):
        assert_bit_equal(tensor, (old.to(wide) * factor).to(old.dtype))
        assert_close(tensor, old.to(torch.float64) / -3, num_roundings=2)


@each_backend
@each_dtype
def test_empty_tensors_in_a_long_list_shift_nothing(backend, dtype):
    sizes = interleaved_sizes()
    accumulators, grads = random_list(sizes, dtype, seed=1), random_list(sizes, dtype, seed=2)
    sums = [a + g for a, g in zip(accumulators, grads, strict=True)]
    layout = layout_of(backend, grads)
    slots, stats = ops.make_slots(layout.num_slots), ops.make_stats()
    ops.accumulate_(accumulators, grads, layout, slots=slots)
    ops.coefficient_(stats, slots, layout, divisor=1.0, max_norm=1.0)
    ops.scale_(accumulators, stats, layout)
    squares = math.fsum(x * x for t in sums for x in memory_order(t).tolist())
    num = sum(ops.num_real(t) for t in sums)
    assert_near(stats[0] / math.sqrt(squares), 1.0, num_roundings=num)
    for tensor, total in zip(accumulators, sums, strict=True):
        expected = ops.real_view(total).to(torch.float64) * stats[1]
        assert_close(ops.real_view(tensor), expected, num_roundings=2)


@each_backend
@pytest.mark.parametrize("maxima", [False, True])
@pytest.mark.parametrize("num_slots", [1, 2, 1001])
@pytest.mark.parametrize("divisor", [1.0, 3.0, 65536.0])
@pytest.mark.parametrize("max_norm", [1e-6, 1e9, math.inf])
def test_the_coefficient_is_the_clip_over_the_divisor(
    backend, maxima, num_slots, divisor, max_norm
):
    (slots,) = random_list([num_slots], torch.float64)
    slots.square_()
    layout, stats = layout_of(backend, []), ops.make_stats()
    ops.coefficient_(stats, slots, layout, divisor=divisor, max_norm=max_norm, maxima=maxima)
    values = slots.tolist()
    norm = (max(values) if maxima else math.sqrt(math.fsum(values))) / divisor
    clip = 1.0 if math.isinf(max_norm) else min(1.0, max_norm / (norm + 1e-6))
    for got, want in zip(stats.tolist(), [norm, clip / divisor, clip], strict=True):
        assert_near(got, want, num_roundings=num_slots)
    assert (stats[2] < 1.0) == (max_norm == 1e-6)


@each_backend
@pytest.mark.parametrize("maxima", [False, True])
def test_no_slot_at_all_is_a_norm_of_zero(backend, maxima):
    stats = ops.make_stats()
    layout = layout_of(backend, [])
    ops.coefficient_(stats, ops.make_slots(0), layout, divisor=2.0, max_norm=1.0, maxima=maxima)
    assert stats.tolist() == [0.0, 0.5, 1.0]


@each_backend
@pytest.mark.parametrize("maxima", [False, True])
@pytest.mark.parametrize("place", [0, 500, 1000])
def test_a_nan_slot_makes_norm_and_coefficient_nan(backend, maxima, place):
    slots = torch.ones(1001, dtype=torch.float64)
    slots[place] = math.nan
    layout, stats = layout_of(backend, []), ops.make_stats()
    ops.coefficient_(stats, slots, layout, divisor=1.0, max_norm=1.0, maxima=maxima)
    assert all(map(math.isnan, stats.tolist()))


@each_backend
@pytest.mark.parametrize("maxima", [False, True])
@pytest.mark.parametrize("place", [0, 500, 1000])
def test_an_infinite_slot_makes_the_norm_infinite(backend, maxima, place):
    slots = torch.ones(1001, dtype=torch.float64)
    slots[place] = math.inf
    layout, stats = layout_of(backend, []), ops.make_stats()
    ops.coefficient_(stats, slots, layout, divisor=1.0, max_norm=1.0, maxima=maxima)
    assert stats[0] == math.inf
