"""NaN and infinity are found wherever they stand, and nothing finite is taken for them."""

import math

import pytest
import torch
from tensors import BACKENDS, DTYPES, dtype_name, layout_of
from tolerance import assert_bit_equal, assert_close, assert_near

from stepclock_ext import ClockedOptimizer, LossScale, ops

each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
each_poison = pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])

SIZES = [1, 17, 257, 1025, 16385, 100_003]


def places(size):
    """First, second, middle, in the tail behind the last full register, and last."""
    return sorted({0, min(1, size - 1), size // 2, max(0, size - 2), size - 1})


def poisoned_list(dtype, poison):
    """A tensor of ones for each size and place, with `poison` there; and the chunk it is in."""
    tensors, chunks, first = [], [], 0
    for size in SIZES:
        for place in places(size):
            real = torch.ones(size * (2 if dtype.is_complex else 1), dtype=dtype.to_real())
            spot = place * 2 + 1 if dtype.is_complex else place  # the imaginary part
            real[spot] = poison
            tensors.append(torch.view_as_complex(real.view(-1, 2)) if dtype.is_complex else real)
            chunks.append(first + spot // ops.CHUNK_ELEMENTS)
            first += ops.num_chunks(real.numel())
    return tensors, chunks


def nonfinite_slots(slots):
    return (~slots.isfinite()).nonzero().flatten().tolist()


@each_backend
@each_dtype
@each_poison
def test_one_bad_value_marks_its_chunk_and_no_other(backend, dtype, poison):
    tensors, chunks = poisoned_list(dtype, poison)
    layout = layout_of(backend, tensors)
    for op in (ops.sum_squares_, ops.max_abs_):
        slots = ops.make_slots(layout.num_slots)
        op(slots, tensors, layout)
        assert nonfinite_slots(slots) == chunks
        assert_bit_equal(slots[chunks], torch.full_like(slots[chunks], abs(poison)))


@each_backend
@each_dtype
@each_poison
@pytest.mark.parametrize("store", [False, True])
def test_accumulating_finds_a_bad_value_on_either_side(backend, dtype, poison, store):
    bad, chunks = poisoned_list(dtype, poison)
    good = [torch.zeros_like(t) for t in bad]
    layout, slots = layout_of(backend, bad), ops.make_slots(layout_of(backend, bad).num_slots)
    ops.accumulate_(good, bad, layout, slots=slots, store=store)
    assert nonfinite_slots(slots) == chunks
    if not store:
        ops.accumulate_(bad, [torch.ones_like(t) for t in bad], layout, slots=slots)
        assert nonfinite_slots(slots) == chunks


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_name)
def test_opposite_infinities_that_meet_in_an_accumulator_are_found(backend, dtype):
    accumulator, grad = torch.ones(257, dtype=dtype), torch.ones(257, dtype=dtype)
    accumulator[256], grad[256] = math.inf, -math.inf
    slots = ops.make_slots(1)
    ops.accumulate_([accumulator], [grad], layout_of(backend, [grad]), slots=slots)
    assert slots.isnan().all()


def wrapper_of(dtype, size, backend, **options):
    param = torch.nn.Parameter(torch.zeros(size, dtype=dtype))
    return param, ClockedOptimizer(torch.optim.SGD([param], lr=1.0), backend=backend, **options)


@each_backend
@each_dtype
@each_poison
@pytest.mark.parametrize("norm_type", [2.0, math.inf, 3.0])
def test_one_bad_value_anywhere_skips_the_update(backend, dtype, poison, norm_type):
    for place in places(257):
        param, opt = wrapper_of(dtype, 257, backend, norm_type=norm_type)
        param.grad = torch.ones_like(param)
        ops.real_view(param.grad).view(-1)[place] = poison
        info = opt.step()
        assert info.skipped
        assert not math.isfinite(info.grad_norm)
        assert not param.detach().any()


HUGE = [
    (torch.float32, 3e38),
    (torch.float64, 1e200),
    (torch.float64, 1.7e308),
    (torch.float16, 65504.0),
    (torch.bfloat16, 3.38e38),
    (torch.complex64, 2e38),
    (torch.complex128, 1e200),
]
TINY = [
    (torch.float32, 1e-45),
    (torch.float64, 1e-170),
    (torch.float64, 5e-324),
    (torch.float16, 6e-8),
    (torch.bfloat16, 1e-40),
    (torch.complex128, 1e-170),
]


@each_backend
@pytest.mark.parametrize("norm_type", [2.0, math.inf, 1.0])
@pytest.mark.parametrize(("dtype", "value"), HUGE + TINY, ids=dtype_name)
def test_a_finite_gradient_of_any_size_is_measured_and_not_skipped(
    backend, norm_type, dtype, value
):
    param, opt = wrapper_of(dtype, 301, backend, norm_type=norm_type)
    param.grad = torch.zeros_like(param)
    param.grad[-1] = value
    info = opt.step()
    assert info.updated
    expected = abs((torch.zeros((), dtype=dtype) + value).item())  # as the dtype holds it
    assert_near(info.grad_norm / expected, 1.0, num_roundings=4)
    assert_bit_equal(param.detach()[-1:], torch.full((1,), -value, dtype=dtype))


@each_backend
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize(("dtype", "value"), HUGE, ids=dtype_name)
def test_a_huge_finite_gradient_is_clipped_to_the_limit(backend, norm_type, dtype, value):
    param, opt = wrapper_of(dtype, 301, backend, norm_type=norm_type, max_grad_norm=1.0)
    param.grad = torch.zeros_like(param)
    param.grad[0] = value
    info = opt.step()
    assert info.updated
    assert_near(info.clipped_norm, info.grad_norm / (info.grad_norm + 1e-6), num_roundings=4)
    expected = torch.zeros_like(param).detach()
    expected[0] = -1.0
    assert_close(ops.real_view(param.detach()), ops.real_view(expected), num_roundings=4)


@each_backend
def test_a_norm_beyond_fp32_is_no_overflow_when_it_rides(backend):
    param, opt = wrapper_of(torch.float32, 70_000, backend, gradient_accumulation_steps=2)
    for _ in range(2):
        opt.backward((param * 1e38).sum())
        info = opt.step()
    assert info.updated
    expected = torch.tensor(1e38).item() * math.sqrt(70_000)
    assert_near(info.grad_norm / expected, 1.0, num_roundings=70_000)


@each_backend
def test_a_sum_that_leaves_the_dtype_is_an_overflow(backend):
    param, opt = wrapper_of(torch.float32, 70_000, backend, gradient_accumulation_steps=2)
    for _ in range(2):
        opt.backward((param * 3e38).sum())
        info = opt.step()
    assert info.skipped
    assert info.grad_norm == math.inf


@each_backend
def test_a_loss_scale_that_overflows_backs_off_until_the_gradient_fits(backend):
    scale = LossScale(init_scale=2.0**12)
    param, opt = wrapper_of(torch.float16, 300, backend, loss_scale=scale)
    skips = 0
    for _ in range(5):  # 100 * 4096, 2048 and 1024 are no fp16 numbers
        opt.backward((param.float() * 100.0).sum())
        info = opt.step()
        skips += info.skipped
    assert skips == 3
    assert info.updated
    assert opt.loss_scale.scale == 2.0**9
