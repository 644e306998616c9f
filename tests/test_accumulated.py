"""`opt.accumulated`: the sum of a window where a user can read and change it."""

import math

import pytest
import torch
from helpers import SIZES, clocked_sgd, each_backend, given, run_micro_steps
from tensors import HALVES, dtype_name
from tolerance import assert_bit_equal

from stepclock_ext import LossScale

DTYPES = [torch.float32, torch.float64, *HALVES]
each_half = pytest.mark.parametrize("dtype", HALVES, ids=dtype_name)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
each_size = pytest.mark.parametrize("size", SIZES, ids=str)


def zeros(size, dtype):
    return torch.nn.Parameter(torch.zeros(size, dtype=dtype))


def sum_dtype(dtype):
    return torch.float32 if dtype in HALVES else dtype


@each_backend
@each_dtype
@each_size
def test_it_is_the_weighted_sum_so_far_after_each_backward_and_step(backend, dtype, size):
    w, absent = zeros(size, dtype), zeros(size, dtype)
    opt = clocked_sgd(w, absent, gradient_accumulation_steps=3, backend=backend)
    for _ in range(2):
        assert opt.accumulated(w) is None
        total = 0.0
        for micro, (slope, weight) in enumerate(((256.0, 1), (1.0, 3), (0.5, 2))):
            opt.backward(given((w, torch.full(size, slope))), weight=weight)
            total += slope * weight
            expected = torch.full(size, total, dtype=sum_dtype(dtype))
            assert_bit_equal(opt.accumulated(w), expected)
            opt.step()
            if micro < 2:
                assert_bit_equal(opt.accumulated(w), expected)
            assert opt.accumulated(absent) is None
        assert opt.accumulated(w) is None


@each_backend
@each_dtype
@pytest.mark.parametrize("scale", [4.0, LossScale(init_scale=4.0)], ids=["static", "dynamic"])
def test_it_is_a_sum_of_scaled_gradients_with_weights_in_a_power_of_two(backend, dtype, scale):
    w = zeros((3,), dtype)
    opt = clocked_sgd(w, gradient_accumulation_steps=2, loss_scale=scale, backend=backend)
    opt.backward(given((w, torch.full((3,), 2.0))), weight=5)  # in units of 4
    assert_bit_equal(opt.accumulated(w), torch.full((3,), 4.0 * 5 / 4 * 2, dtype=sum_dtype(dtype)))
    opt.step()
    opt.backward(given((w, torch.full((3,), 1.0))), weight=3)
    assert_bit_equal(
        opt.accumulated(w), torch.full((3,), 10.0 + 4.0 * 3 / 4, dtype=sum_dtype(dtype))
    )
    info = opt.step()
    assert info.grad_norm == pytest.approx(13 / 8 * math.sqrt(3), rel=1e-6)
    assert_bit_equal(w.detach(), torch.full((3,), -13 / 8, dtype=dtype))


@each_dtype
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_tensor_that_is_no_parameter_of_the_optimizer_is_refused(dtype, accumulation):
    w = zeros((3,), dtype)
    opt = clocked_sgd(w, gradient_accumulation_steps=accumulation)
    for stranger in (zeros((3,), dtype), w.detach(), w * 1, torch.zeros(())):
        with pytest.raises(ValueError, match="accumulated: p must be a parameter"):
            opt.accumulated(stranger)
    assert run_micro_steps(opt, w, [1] * accumulation).updated


@each_backend
@each_dtype
@each_size
@pytest.mark.parametrize("when", ["inside", "before the last step"])
def test_a_change_of_it_in_place_counts_in_the_norm_and_in_the_update(backend, dtype, size, when):
    w, other = zeros(size, dtype), zeros(size, dtype)
    opt = clocked_sgd(w, other, gradient_accumulation_steps=2, backend=backend)
    for micro in range(2):
        opt.backward(given((w, torch.full(size, 4.0)), (other, torch.full(size, 3.0))))
        if micro == (when != "inside"):
            opt.accumulated(w).mul_(0.5)
        info = opt.step()
    slope = 3.0 if when == "inside" else 2.0  # (4 / 2 + 4) / 2, or (4 + 4) / 2 / 2
    exact = math.sqrt((slope**2 + 9) * w.numel())
    assert info.grad_norm == pytest.approx(exact, rel=1e-6)
    assert_bit_equal(w.detach(), torch.full(size, -slope, dtype=dtype))
    assert_bit_equal(other.detach(), torch.full(size, -3.0, dtype=dtype))


@each_backend
@each_half
def test_infinity_written_into_it_is_a_skip(backend, dtype):
    w = zeros((3,), dtype)
    opt = clocked_sgd(w, gradient_accumulation_steps=2, backend=backend)
    run_micro_steps(opt, w, [3.0])
    opt.backward(w.sum())
    opt.accumulated(w)[1] = math.inf
    info = opt.step()
    assert (info.updated, info.skipped, w.count_nonzero()) == (False, True, 0)
    assert run_micro_steps(opt, w, [3.0, 3.0]).updated


@each_half
def test_asking_for_it_between_backward_and_step_changes_nothing(dtype):
    results = []
    for asked in (False, True):
        params = [zeros(size, dtype) for size in SIZES]
        opt = clocked_sgd(*params, gradient_accumulation_steps=3, max_grad_norm=0.7)
        for micro in range(6):
            generator = torch.Generator().manual_seed(micro)
            opt.backward(given(*((p, torch.randn(p.shape, generator=generator)) for p in params)))
            if asked:
                assert all(opt.accumulated(p).dtype == torch.float32 for p in params)
            info = opt.step()
        results.append((info.grad_norm, [p.detach() for p in params]))
    assert results[0][0] == results[1][0]
    for got, want in zip(results[0][1], results[1][1], strict=True):
        assert_bit_equal(got, want)
