"""The CUDA kernels on gradients, run by the simulator: sums, maxima, accumulation, scaling."""

import itertools
import math

import pytest
import torch
from simulated import SimulatedBackend, SimulatorError, leave
from tensors import BACKENDS, HALVES, REALS, clones, coefficient_stats, dtype_name, random_list
from tolerance import assert_all_bit_equal, assert_bit_equal, assert_close

from stepclock_ext import ops

# Nothing, one, a block of threads, the part of a chunk that a block takes, a chunk, several.
SIZES = [0, 1, 255, 256, 257, 4095, 4096, 4097, 16383, 16384, 16385, 40_001]
KINDS = [*((dtype, dtype) for dtype in REALS), *((torch.float32, half) for half in HALVES)]
FAST = "cpu" if "cpu" in BACKENDS else "reference"

each_real = pytest.mark.parametrize("dtype", REALS, ids=dtype_name)
each_kind = pytest.mark.parametrize(("wide", "dtype"), KINDS, ids=dtype_name)
each_alignment = pytest.mark.parametrize("unaligned", [False, True], ids=["aligned", "unaligned"])
ORDERS = [dict(blocks=b, threads=t) for b, t in itertools.product((0, 1, 7), repeat=2)]


@pytest.fixture(scope="module")
def loaded():
    return SimulatedBackend()


@pytest.fixture
def backend(loaded):
    """The simulated kernels, in the plain order."""
    yield loaded
    loaded.set_order()
    loaded.alter = leave


def slots_of(op, backend, tensors):
    layout = ops.Layout.of(backend, tensors)
    slots = ops.make_slots(layout.num_slots)
    op(slots, tensors, layout)
    return slots


def assert_sums_close(slots, expected):
    """Sums of a chunk's squares, each in its own size."""
    one = torch.where(expected == 0, 1.0, expected)
    assert_close(slots / one, expected / one, num_roundings=ops.CHUNK_ELEMENTS)


def accumulate(backend, wide, dtype, *, store=False, unaligned=(False, False), seed=1):
    """What an accumulation leaves: accumulators, and the three kinds of slots."""
    sums = random_list(SIZES, wide, seed=seed, unaligned=unaligned[0])
    grads = random_list(SIZES, dtype, seed=seed + 1, unaligned=unaligned[1])
    layout = ops.Layout.of(backend, grads, accumulate_dtype=wide)
    slots = [ops.make_slots(layout.num_slots) for _ in range(3)]
    into = dict(zip(("slots", "grad_slots", "prior_slots"), slots, strict=True))
    ops.accumulate_(sums, grads, layout, store=store, **into)
    return sums, slots


@each_real
@each_alignment
def test_every_slot_is_its_chunks_sum_of_squares(backend, dtype, unaligned):
    tensors = random_list(SIZES, dtype, unaligned=unaligned)
    slots = slots_of(ops.sum_squares_, backend, tensors)
    expected = slots_of(ops.sum_squares_, ops.make_backend("reference"), tensors)
    assert_sums_close(slots, expected)


@each_real
def test_a_sum_has_the_same_bits_wherever_its_elements_lie(backend, dtype):
    aligned, unaligned = (random_list(SIZES, dtype, unaligned=u) for u in (False, True))
    assert_bit_equal(
        slots_of(ops.sum_squares_, backend, unaligned), slots_of(ops.sum_squares_, backend, aligned)
    )


@each_real
@each_alignment
def test_every_slot_is_its_chunks_largest_magnitude(backend, dtype, unaligned):
    tensors = random_list(SIZES, dtype, unaligned=unaligned)
    slots = slots_of(ops.max_abs_, backend, tensors)
    assert_bit_equal(slots, slots_of(ops.max_abs_, ops.make_backend("reference"), tensors))


@each_real
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_one_bad_value_marks_its_chunk_and_no_other(backend, dtype, poison):
    for place in (0, 5, 4095, 16383, 16384, 40_000):
        tensors = [torch.ones(size, dtype=dtype) for size in (257, 40_001, 16384)]
        tensors[1][place] = poison
        for op in (ops.sum_squares_, ops.max_abs_):
            slots = slots_of(op, backend, tensors)
            chunk = 1 + place // ops.CHUNK_ELEMENTS
            assert (~slots.isfinite()).nonzero().flatten().tolist() == [chunk]
            assert_bit_equal(slots[chunk], torch.tensor(abs(poison), dtype=torch.float64))


@pytest.mark.parametrize("op", [ops.sum_squares_, ops.max_abs_])
def test_slots_of_other_rows_are_left_alone(backend, op):
    tensors = random_list([16385, 0, 3], torch.float32)
    layout = ops.Layout.of(backend, tensors, [4, 1, 9])
    slots = torch.full((12,), -7.0, dtype=torch.float64)
    op(slots, tensors, layout)
    assert (slots != -7.0).nonzero().flatten().tolist() == [4, 5, 9]


@each_kind
@pytest.mark.parametrize("store", [False, True])
def test_accumulating_adds_in_fp32_and_rounds_once(backend, wide, dtype, store):
    for unaligned in itertools.product((False, True), repeat=2):
        sums, slots = accumulate(backend, wide, dtype, store=store, unaligned=unaligned)
        expected, others = accumulate(ops.make_backend(FAST), wide, dtype, store=store)
        assert_all_bit_equal(sums, expected)
        for got, want in zip(slots, others, strict=True):
            assert_sums_close(got, want)


@each_kind
def test_sums_that_ride_have_the_bits_of_sums_that_are_read(backend, wide, dtype):
    for unaligned in itertools.product((False, True), repeat=2):
        sums, slots = accumulate(backend, wide, dtype, unaligned=unaligned)
        before = random_list(SIZES, wide, seed=1)
        grads = random_list(SIZES, dtype, seed=2)
        for got, tensors in zip(slots, (sums, grads, before), strict=True):
            assert_bit_equal(got, slots_of(ops.sum_squares_, backend, tensors))


@each_kind
def test_an_accumulation_without_slots_is_the_same(backend, wide, dtype):
    sums, grads = random_list(SIZES, wide, seed=1), random_list(SIZES, dtype, seed=2)
    ops.accumulate_(sums, grads, ops.Layout.of(backend, grads, accumulate_dtype=wide))
    assert_all_bit_equal(sums, accumulate(backend, wide, dtype)[0])


@each_real
@pytest.mark.parametrize("bad_sum", [math.nan, math.inf, None])
def test_accumulating_finds_a_bad_value_on_either_side(backend, dtype, bad_sum):
    sum_, grad = torch.ones(16390, dtype=dtype), torch.ones(16390, dtype=dtype)
    (grad if bad_sum is None else sum_)[16389] = -math.inf if bad_sum is None else bad_sum
    slots = ops.make_slots(2)
    ops.accumulate_([sum_], [grad], ops.Layout.of(backend, [grad]), slots=slots)
    assert slots.isfinite().tolist() == [True, False]


@each_real
@each_alignment
def test_scaling_is_one_multiplication_rounded_once(backend, dtype, unaligned):
    tensors = random_list(SIZES, dtype, unaligned=unaligned)
    others, stats = clones(tensors), coefficient_stats(-1 / 3)
    ops.scale_(tensors, stats, ops.Layout.of(backend, tensors))
    ops.scale_(others, stats, ops.Layout.of(ops.make_backend(FAST), others))
    assert_all_bit_equal(tensors, others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=dtype_name)
def test_chunks_follow_memory_whatever_the_strides(backend, dtype):
    image, matrix = random_list([2 * 3 * 40 * 110, 6 * 20], dtype)
    tensors = [
        image.reshape(2, 3, 40, 110).to(memory_format=torch.channels_last),
        matrix.reshape(6, 20).t(),
    ]
    others, layout = clones(tensors), ops.Layout.of(backend, tensors)
    slots = slots_of(ops.sum_squares_, backend, tensors)
    expected = slots_of(ops.sum_squares_, ops.make_backend("reference"), tensors)
    assert_sums_close(slots, expected)
    ops.accumulate_(tensors, others, layout)
    assert_all_bit_equal(tensors, [t + t for t in others])
    ops.scale_(tensors, coefficient_stats(0.5), layout)
    assert_all_bit_equal(tensors, others)


def test_a_list_of_every_dtype_is_worked_on_section_by_section(backend):
    kinds = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.bfloat16]
    tensors = [random_list([16385 + row], kind, seed=row)[0] for row, kind in enumerate(kinds)]
    others, stats = clones(tensors), coefficient_stats(1.7)
    slots = slots_of(ops.sum_squares_, backend, tensors)
    expected = slots_of(ops.sum_squares_, ops.make_backend("reference"), tensors)
    assert_sums_close(slots, expected)
    ops.scale_(tensors, stats, ops.Layout.of(backend, tensors))
    ops.scale_(others, stats, ops.Layout.of(ops.make_backend(FAST), others))
    assert_all_bit_equal(tensors, others)


@pytest.mark.parametrize("order", ORDERS[1:], ids=str)
def test_no_order_of_blocks_and_threads_changes_a_bit(backend, order):
    results = []
    for chosen in ({}, order):
        backend.set_order(**chosen)
        sums, slots = accumulate(backend, torch.float32, torch.bfloat16)
        maxima = slots_of(ops.max_abs_, backend, sums)
        ops.scale_(sums, coefficient_stats(0.3), ops.Layout.of(backend, sums))
        results.append([*sums, *slots, maxima])
    assert_all_bit_equal(*results)


@pytest.mark.parametrize("unaligned", [False, True], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("beyond", [2**31, 2**33 + 2**31], ids=["2**31", "2**33+2**31"])
def test_elements_beyond_the_reach_of_32_bits_are_found(backend, beyond, unaligned):
    tensors = random_list([40_001], torch.float32, unaligned=unaligned)
    grads = random_list([40_001], torch.float32, seed=1)
    expected = [tensors[0] + grads[0]]

    def move_away(chunks, num_elements, addresses):
        chunks[:, 1] += beyond
        num_elements += beyond
        addresses -= torch.where(addresses != 0, 4 * beyond, 0)

    backend.alter = move_away
    layout = ops.Layout.of(backend, tensors)
    slots = ops.make_slots(layout.num_slots)
    ops.accumulate_(tensors, grads, layout, slots=slots)
    assert_all_bit_equal(tensors, expected)
    ops.scale_(tensors, coefficient_stats(2.0), layout)
    assert_all_bit_equal(tensors, [2 * expected[0]])
    ops.sum_squares_(slots, tensors, layout)
    assert_sums_close(slots, slots_of(ops.sum_squares_, ops.make_backend("reference"), tensors))


def test_an_access_outside_the_tensors_is_an_error(backend):
    (tensor,) = random_list([257], torch.float32)

    def grow(chunks, num_elements, addresses):
        num_elements += 1

    backend.alter = grow
    with pytest.raises(SimulatorError, match="sum_squares: a load outside the allowed memory"):
        slots_of(ops.sum_squares_, backend, [tensor])
    with pytest.raises(SimulatorError, match=r"scale: .* outside the allowed memory \(block 0"):
        ops.scale_([tensor], coefficient_stats(1.0), ops.Layout.of(backend, [tensor]))
