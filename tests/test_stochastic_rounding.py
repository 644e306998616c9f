"""Stochastic rounding: to one of two neighbours, right in the mean, the same bits by key."""

import math

import pytest
import torch
from fused import (
    PLAIN_SGD,
    UPDATES,
    Rows,
    every_upper_half,
    in_every_way,
    make_rows,
    neighbours,
    sgd,
)
from tensors import BACKENDS, HALVES, dtype_name, memory_order, random_list
from tolerance import assert_all_bit_equal, assert_bit_equal

from stepclock_ext import ops
from stepclock_ext.backends.rounding import chunk_key, random_bits

each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_half = pytest.mark.parametrize("dtype", HALVES, ids=dtype_name)
needs_cpu = pytest.mark.skipif("cpu" not in BACKENDS, reason="the kernels were not built")
KEY = ops.update_key(seed=7, update=3)
SIZES = [0, 1, 255, 257, 1025, 16383, 16385, 40_001]
# Bits that fall away from a normal number.
LOST_BITS = {torch.bfloat16: 16, torch.float16: 13}
SIGMAS = 5  # beyond chance: one in three million


def rounded(backend, values, dtype, key):
    """`values` (fp32) as an update stores them: 0 - 1 * (-1 * x)."""
    params = [torch.zeros_like(x, dtype=dtype) for x in values]
    layout = ops.Layout.of(ops.make_backend(backend), params, accumulate_dtype=torch.float32)
    rows = Rows(layout, params, values, [], [], [])
    sgd(rows, {**PLAIN_SGD, "lr": 1.0}, coefficient=-1.0, rounding_key=key)
    return params


def rounded_by_hand(values, dtype, key):
    """What `rounded` makes of contiguous tensors: element by element in memory order."""
    first, results = 0, []
    for x in values:
        parts = []
        for slot, chunk in enumerate(x.split(ops.CHUNK_ELEMENTS), first):
            random = random_bits(chunk_key(key, slot), chunk.numel())
            parts.append(ops.round_stochastically(chunk, dtype, random))
        results.append(torch.cat(parts))
        first += ops.num_chunks(x.numel())
    return results


def with_every_noise(value, dtype):
    """What becomes of `value` under each of the random bits that can matter, fp64."""
    num = 2 ** LOST_BITS[dtype]
    random = torch.arange(num) * (2**32 // num)
    values = torch.full((num,), value)
    return values[:1].double(), ops.round_stochastically(values, dtype, random).double()


def test_update_keys_are_those_of_splitmix64():
    assert ops.update_key(0, 0) == 0xE220A8397B1DCDAF
    assert [ops.update_key(1234567, i) for i in range(2)] == [
        6457827717110365317,
        3203168211198807973,
    ]


def test_random_bits_are_those_of_murmurs_finalizer():
    assert random_bits(0, 1).tolist() == [0]
    assert random_bits(1, 1).tolist() == [0x514E28B7]
    weyl = 0x9E3779B9
    assert random_bits(5, 3)[2] == random_bits((5 + 2 * weyl) % 2**32, 1)[0]


@each_half
def test_a_value_goes_to_one_of_its_two_neighbours(dtype):
    values = every_upper_half()
    values = values[values.isfinite()]
    below, above = (t.to(dtype) for t in neighbours(values, dtype))
    (got,) = rounded_by_hand([values], dtype, KEY)
    assert ((got == below) | (got == above)).all()
    assert torch.equal(got.signbit(), values.signbit())
    assert ((got == below) & (got != above)).any()
    assert ((got == above) & (got != below)).any()


@each_half
@pytest.mark.parametrize("value", [1.0004, -1.0004, 1 / 3, -77.7, 60001.5, -0.0001])
def test_over_all_random_bits_the_mean_is_the_value_to_the_bit(dtype, value):
    exact, got = with_every_noise(value, dtype)
    assert got.mean().item() == exact.item()
    below, above = neighbours(exact, dtype)
    assert torch.equal(got.unique(), torch.cat([below, above]))


@pytest.mark.parametrize("value", [3e-5, -6e-5, 1e-7, -1e-9, 2.0**-37 / 3])
def test_the_mean_of_an_fp16_subnormal_is_kept_to_what_fp32_holds_above_it(value):
    exact, got = with_every_noise(value, torch.float16)
    assert abs(got.mean().item() - exact.item()) < 2.0**-37  # an fp32 unit of 2**-14


@pytest.mark.parametrize("units", [0.25, 0.5, 1.75, 511.125, 1023 + 2.0**-13])
@pytest.mark.parametrize("sign", [1, -1])
def test_an_fp16_subnormal_goes_up_as_often_as_it_lies_above(units, sign):
    exact, got = with_every_noise(sign * units * 2.0**-24, torch.float16)
    assert got.mean().item() == exact.item()
    assert (got.abs() == math.ceil(units) * 2.0**-24).double().mean() == units % 1


@each_backend
@each_half
@pytest.mark.parametrize("scale", [1.0, -1.0, 2.0**-19])  # fp16 subnormals the last
def test_the_mean_over_elements_and_keys_is_the_value_within_its_standard_error(
    backend, dtype, scale
):
    (values,) = random_list([16385], torch.float32, seed=3)
    values = values.abs() * scale
    below, above = neighbours(values, dtype)
    p = (values.double() - below) / (above - below).clamp(min=1e-300)
    variance = p * (1 - p) * (above - below).square()
    errors = torch.zeros_like(below)
    num_keys = 16
    for update in range(num_keys):
        (got,) = rounded(backend, [values], dtype, ops.update_key(11, update))
        errors += got.double() - values
    assert abs(errors.sum()) < SIGMAS * (num_keys * variance.sum()).sqrt()
    # And no element prefers a side: the squares of the standardised errors add up as they should.
    moves = variance > 0.01 * variance.mean()
    squares = errors[moves].square() / (num_keys * variance[moves])
    kurtosis = (1 / (p * (1 - p)) - 6)[moves] / num_keys  # of a sum of Bernoulli trials
    assert abs(squares.sum() - moves.sum()) < SIGMAS * (2 + kurtosis).sum().sqrt()


@each_backend
@each_half
def test_a_value_that_the_dtype_holds_never_moves(backend, dtype):
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for update in range(4):
        (got,) = rounded(backend, [patterns.float()], dtype, ops.update_key(0, update))
        assert_bit_equal(got, patterns + torch.zeros((), dtype=dtype))  # -0 becomes +0 on the way


@each_backend
@each_half
def test_nan_and_infinity_stay_and_so_does_what_is_beyond_the_largest(backend, dtype):
    largest = torch.finfo(dtype).max
    values = torch.tensor([math.nan, math.inf, -math.inf, largest, -largest]).repeat(4000)
    (got,) = rounded(backend, [values], dtype, KEY)
    assert_bit_equal(got, values.to(dtype))
    if dtype == torch.float16:  # 65536 is where the next number would be
        values = torch.tensor([65536.0, -65536.0, 1e30]).repeat(4000)
        (got,) = rounded(backend, [values], dtype, KEY)
        assert torch.equal(got.float(), values.sign() * math.inf)


@each_backend
@each_half
@pytest.mark.parametrize("part", [0.25, 0.75])
def test_a_value_just_below_infinity_goes_there_by_its_probability(backend, dtype, part):
    largest = torch.finfo(dtype).max
    gap = 2.0 ** math.ceil(math.log2(largest)) - largest
    values = torch.full((16384,), largest + gap * part)
    (got,) = rounded(backend, [values], dtype, KEY)
    assert set(got.tolist()) == {largest, math.inf}
    num_up = int(got.isinf().sum())
    assert abs(num_up - 16384 * part) < SIGMAS * math.sqrt(16384 * part * (1 - part))


@needs_cpu
@each_half
def test_the_kernel_rounds_every_number_as_its_specification(dtype):
    values = every_upper_half()
    (got,) = rounded("cpu", [values], dtype, KEY)
    (expected,) = rounded("reference", [values], dtype, KEY)
    assert_bit_equal(got, expected)
    assert_all_bit_equal([got], rounded_by_hand([values + 0.0], dtype, KEY))


@each_backend
@each_half
@pytest.mark.parametrize("key", [0, KEY, 2**64 - 1])
def test_tensors_of_every_size_are_rounded_element_by_element(backend, dtype, key):
    for unaligned in (False, True):
        values = random_list(SIZES, torch.float32, seed=1, unaligned=unaligned)
        got = rounded(backend, values, dtype, key)
        assert_all_bit_equal(got, rounded_by_hand(values, dtype, key))


@each_backend
@each_half
def test_random_bits_go_by_the_place_in_memory_whatever_the_strides(backend, dtype):
    image, matrix, cube = random_list([2 * 3 * 40 * 110, 60 * 301, 2 * 3 * 4], torch.float32)
    values = [
        image.reshape(2, 3, 40, 110).to(memory_format=torch.channels_last),
        matrix.reshape(60, 301).t(),
        cube.reshape(2, 3, 4).permute(2, 0, 1),
    ]
    got = [memory_order(t) for t in rounded(backend, values, dtype, KEY)]
    flat = [memory_order(t).float() for t in values]
    assert_all_bit_equal(got, [t.double() for t in rounded_by_hand(flat, dtype, KEY)])


@each_backend
@each_half
def test_a_key_gives_the_same_bits_each_time_and_another_key_others(backend, dtype):
    values = random_list(SIZES[1:], torch.float32, seed=2)
    once = rounded(backend, values, dtype, KEY)
    assert_all_bit_equal(rounded(backend, values, dtype, KEY), once)
    for other in (0, KEY + 1, ops.update_key(7, 4), ops.update_key(8, 3), 2**64 - 1):
        got = rounded(backend, values, dtype, other)
        assert all((a != b).any() for a, b in zip(got[1:], once[1:], strict=True))


@each_backend
@each_half
def test_equal_chunks_and_equal_rows_are_rounded_independently(backend, dtype):
    third = torch.full((2 * ops.CHUNK_ELEMENTS,), 1 / 3)
    first, second = rounded(backend, [third, third.clone()], dtype, KEY)
    chunks = [*first.split(ops.CHUNK_ELEMENTS), *second.split(ops.CHUNK_ELEMENTS)]
    up = torch.stack([(chunk.double() > 1 / 3).double() for chunk in chunks])
    correlation = torch.corrcoef(up) - torch.eye(4)
    assert correlation.abs().max() < SIGMAS / math.sqrt(ops.CHUNK_ELEMENTS)


@needs_cpu
@each_half
@pytest.mark.parametrize("update", UPDATES)
def test_threads_and_instruction_sets_round_alike(dtype, update):
    def run():
        rows = make_rows("cpu", SIZES, dtype, sums=torch.float32)
        UPDATES[update](rows, rounding_key=KEY)
        return rows.written()

    results = in_every_way(run)
    for other in results[1:]:
        assert_all_bit_equal(other, results[0])


@each_backend
@each_half
@pytest.mark.parametrize("update", UPDATES)
def test_an_update_by_key_is_the_fp32_update_rounded_by_key(backend, dtype, update):
    rows = make_rows(backend, SIZES, dtype, sums=torch.float32, state=torch.float32)
    wide = make_rows(backend, SIZES, torch.float32)
    wide.params = [p.float() for p in rows.params]
    UPDATES[update](rows, rounding_key=KEY)
    UPDATES[update](wide)
    assert_all_bit_equal(rows.params, rounded_by_hand(wide.params, dtype, KEY))
    assert_all_bit_equal(rows.written()[len(SIZES) :], wide.written()[len(SIZES) :])


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=dtype_name)
def test_a_key_changes_nothing_about_wider_parameters(backend, dtype):
    rows, others = (make_rows(backend, [257, 1025], dtype) for _ in range(2))
    UPDATES["adam"](rows, rounding_key=KEY)
    UPDATES["adam"](others)
    assert_all_bit_equal(rows.written(), others.written())


@each_backend
@each_half
def test_without_a_key_a_value_goes_to_the_nearest(backend, dtype):
    values = random_list([4097], torch.float32)
    got = rounded(backend, values, dtype, None)
    assert_all_bit_equal(got, [x.to(dtype) for x in values])
