"""bf16 and fp16: each of their patterns is read right, and each sum is rounded as torch rounds."""

import pytest
import torch
from tensors import BACKENDS, HALVES, coefficient_stats, dtype_name, layout_of
from tolerance import assert_bit_equal, bits

from stepclock_ext import ops

each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_half = pytest.mark.parametrize("dtype", HALVES, ids=dtype_name)


def every_pattern(dtype):
    """All 65536 values."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def summed(backend, accumulator, grad):
    accumulator = accumulator.clone()
    ops.accumulate_([accumulator], [grad], layout_of(backend, [grad]))
    return accumulator


@each_backend
@each_half
def test_a_coefficient_of_one_keeps_every_pattern(backend, dtype):
    values, before = every_pattern(dtype), every_pattern(dtype)
    ops.scale_([values], coefficient_stats(1.0), layout_of(backend, [values]))
    assert_bit_equal(values, before)
    numbers = ~before.isnan()
    assert torch.equal(bits(values)[numbers], bits(before)[numbers])  # the sign of zero as well


@each_backend
@each_half
@pytest.mark.parametrize("coefficient", [2.0, -0.5, 2.0**-20, 2.0**20, 1 / 3, 1e-3])
def test_every_pattern_is_scaled_in_fp32_and_rounded_once(backend, dtype, coefficient):
    values = every_pattern(dtype)
    expected = (values.float() * torch.tensor(coefficient)).to(dtype)
    ops.scale_([values], coefficient_stats(coefficient), layout_of(backend, [values]))
    assert_bit_equal(values, expected)


@each_backend
@each_half
def test_a_pattern_is_read_as_its_own_value(backend, dtype):
    values = every_pattern(dtype)[3::64]  # a row each: all of them would take seconds
    rows = list(values.split(1))
    layout, slots = layout_of(backend, rows), ops.make_slots(len(rows))
    ops.sum_squares_(slots, rows, layout)
    assert_bit_equal(slots, values.double().square())
    ops.max_abs_(slots, rows, layout)
    assert_bit_equal(slots, values.double().abs())


@each_backend
@each_half
@pytest.mark.parametrize("seed", range(8))
def test_sums_of_random_patterns_are_rounded_as_torchs(backend, dtype, seed):
    values = every_pattern(dtype)
    grad = values[torch.randperm(2**16, generator=torch.Generator().manual_seed(seed))]
    assert_bit_equal(summed(backend, values, grad), values + grad)


@each_backend
@each_half
@pytest.mark.parametrize("numerator", [-3, -1, 1, 3])
def test_sums_on_and_beside_a_tie_go_to_the_even_neighbour(backend, dtype, numerator):
    values = every_pattern(dtype)
    values = values[values.isfinite()].float()
    gap = torch.finfo(dtype).eps * torch.exp2(values.abs().log2().floor()).nan_to_num(0.0)
    for beside in (1.0, 1.0 - 2.0**-7, 1.0 + 2.0**-7):
        grad = (gap * numerator / 2 * beside).to(dtype)
        expected = (values + grad.float()).to(dtype)
        assert_bit_equal(summed(backend, values.to(dtype), grad), expected)


@each_backend
@each_half
def test_sums_around_the_largest_number_overflow_where_torchs_do(backend, dtype):
    top = every_pattern(dtype)
    top = top[top.isfinite() & (top.abs() > torch.finfo(dtype).max / 4)]
    for shift in range(0, top.numel(), top.numel() // 16):
        grad = top.roll(shift)
        assert_bit_equal(summed(backend, top, grad), top + grad)


@each_backend
@each_half
def test_sums_of_subnormals_are_exact_as_torchs(backend, dtype):
    small = every_pattern(dtype)
    small = small[small.abs() < 4 * torch.finfo(dtype).tiny]
    for shift in range(0, small.numel(), small.numel() // 16):
        grad = small.roll(shift)
        assert_bit_equal(summed(backend, small, grad), small + grad)
