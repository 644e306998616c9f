"""Windows of 16-bit gradients: in what dtype they are summed, to which sum, norm and update."""

import math

import pytest
import torch
from helpers import (
    SIZES,
    assert_close,
    clip_factor,
    clocked_sgd,
    each_backend,
    given,
    parameter,
    run_micro_steps,
)
from tensors import BACKENDS, HALVES, dtype_name
from tolerance import assert_bit_equal, assert_near

each_half = pytest.mark.parametrize("dtype", HALVES, ids=dtype_name)
each_size = pytest.mark.parametrize("size", SIZES, ids=str)
# Up to the first number, ones add up in the dtype itself; more of them are lost.
LAST_SUM = {torch.bfloat16: 256, torch.float16: 2048}
MANY = {torch.bfloat16: 1024, torch.float16: 4096}
many = pytest.mark.parametrize(
    ("backend", "dtype"),
    [*((name, torch.bfloat16) for name in BACKENDS), (BACKENDS[-1], torch.float16)],
    ids=dtype_name,
)


def zeros(size, dtype):
    return torch.nn.Parameter(torch.zeros(size, dtype=dtype))


def values(size, dtype, *, seed):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@many
def test_a_thousand_gradients_of_one_average_to_one(backend, dtype):
    w = zeros((300,), dtype)
    opt = clocked_sgd(w, gradient_accumulation_steps=MANY[dtype], backend=backend)
    info = run_micro_steps(opt, w, [w.numel()] * MANY[dtype])
    assert_bit_equal(w.detach(), torch.full((300,), -1.0, dtype=dtype))
    assert_near(info.grad_norm, math.sqrt(w.numel()), num_roundings=w.numel(), dtype=torch.float32)


@many
def test_in_the_dtype_itself_where_that_is_asked_for_most_of_them_are_lost(backend, dtype):
    w = zeros((), dtype)
    number = MANY[dtype]
    opt = clocked_sgd(
        w, gradient_accumulation_steps=number, accumulate_dtype=dtype, backend=backend
    )
    run_micro_steps(opt, w, [1] * number)
    assert w.item() == -LAST_SUM[dtype] / number


@each_backend
@each_half
@each_size
def test_one_after_the_largest_exact_integer_is_not_lost(backend, dtype, size):
    w = zeros(size, dtype)
    opt = clocked_sgd(w, gradient_accumulation_steps=2, backend=backend)
    for value in (LAST_SUM[dtype], 1):
        opt.backward(given((w, torch.full(size, float(value)))))
        if value != 1:
            opt.step()
    assert_bit_equal(opt.accumulated(w), torch.full(size, LAST_SUM[dtype] + 1.0))
    norm = (LAST_SUM[dtype] + 1) / 2 * math.sqrt(w.numel())
    got = opt.step().grad_norm
    assert_near(got, norm, num_roundings=w.numel(), dtype=torch.float32)
    assert abs(got - norm) < 1e-4 * norm  # without the one: 4e-3 of bf16, 5e-4 of fp16


@each_backend
@each_half
@pytest.mark.parametrize("plain", [False, True], ids=["opt.backward", "loss.backward"])
@pytest.mark.parametrize("micro_steps", [2, 4, 8])
def test_a_window_is_the_sum_that_a_plain_fp32_loop_makes(backend, dtype, plain, micro_steps):
    params = [zeros(size, dtype) for size in [*SIZES, (0,), (7, 5)]]
    opt = clocked_sgd(*params, gradient_accumulation_steps=micro_steps, backend=backend)
    sums = [torch.zeros(p.shape) for p in params]
    for micro in range(micro_steps):
        grads = [values(p.shape, dtype, seed=7 * micro + row) for row, p in enumerate(params)]
        loss = given(*zip(params, grads, strict=True))
        loss.backward() if plain else opt.backward(loss)
        sums = [total + grad.float() for total, grad in zip(sums, grads, strict=True)]
        for p, total in zip(params, sums, strict=True):
            assert p.grad is None
            assert_bit_equal(opt.accumulated(p), total)
        info = opt.step()
    exact = math.sqrt(sum(s.double().square().sum().item() for s in sums)) / micro_steps
    assert_near(info.grad_norm, exact, num_roundings=70_000, dtype=torch.float32)
    for p, total in zip(params, sums, strict=True):  # 1 / micro_steps is exact
        assert_bit_equal(p.detach(), (0 - total / micro_steps).to(dtype))


@each_backend
@each_half
def test_a_sum_beyond_the_range_of_the_dtype_is_no_overflow(backend, dtype):
    w = zeros((3,), dtype)
    opt = clocked_sgd(w, gradient_accumulation_steps=2, backend=backend)
    top = 60_000.0 if dtype == torch.float16 else 2.0**126
    for _ in range(2):
        opt.backward(given((w, torch.full((3,), top))))
        info = opt.step()
    assert info.updated
    assert_bit_equal(w.detach(), torch.full((3,), -top, dtype=dtype))


@each_backend
@each_half
def test_weights_and_the_clip_are_applied_to_the_fp32_sum(backend, dtype):
    w = zeros((2,), dtype)
    opt = clocked_sgd(w, gradient_accumulation_steps=3, max_grad_norm=1.0, backend=backend)
    for grad, weight in (([256.0, 1.0], 1), ([1.0, 0.0], 1), ([7.0, 3.0], 2)):
        opt.backward(given((w, grad)), weight=weight)
        info = opt.step()
    mean = torch.tensor([271.0, 7.0], dtype=torch.float64) / 4
    assert_close(info.grad_norm, mean.norm().item())
    assert_close(info.clipped_norm, mean.norm().item() * clip_factor(mean.norm().item(), 1.0))
    exact = -mean * clip_factor(mean.norm().item(), 1.0)
    assert_bit_equal(w.detach(), exact.to(dtype))


# Case 31: the norm that is reported.


@each_backend
@each_half
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("asked", [None, "own", torch.float32], ids=str)
def test_the_norm_of_1000_ones_has_more_than_three_digits(backend, dtype, accumulation, asked):
    w = zeros((1000,), dtype)
    asked = dtype if asked == "own" else asked
    opt = clocked_sgd(
        w, gradient_accumulation_steps=accumulation, accumulate_dtype=asked, backend=backend
    )
    info = run_micro_steps(opt, w, [1000] * accumulation)
    assert_near(info.grad_norm, math.sqrt(1000), num_roundings=1, dtype=torch.float32)


@each_backend
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("asked", [None, torch.float32], ids=str)
def test_the_norm_of_four_dtypes_is_one_norm(backend, accumulation, asked):
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    params = [parameter(0.0, dtype=dtype) for dtype in dtypes]
    opt = clocked_sgd(
        *params, gradient_accumulation_steps=accumulation, accumulate_dtype=asked, backend=backend
    )
    for _ in range(accumulation):
        opt.backward(given(*zip(params, (1, 2, 4, 10), strict=True)))
        info = opt.step()
    assert_close(info.grad_norm, 11.0)
    assert [p.item() for p in params] == [-1, -2, -4, -10]


@each_backend
@each_half
def test_the_norm_does_not_depend_on_the_number_of_micro_steps(backend, dtype):
    samples = torch.randint(-8, 9, (16, 5), generator=torch.Generator().manual_seed(0))
    norms = []
    for accumulation in (1, 4):
        w = zeros((5,), dtype)
        opt = clocked_sgd(w, gradient_accumulation_steps=accumulation, backend=backend)
        for batch in samples.chunk(accumulation):
            opt.backward((batch.to(dtype) * w).sum() / len(batch))
            info = opt.step()
        norms.append(info.grad_norm)
    exact = samples.double().mean(0).norm().item()
    assert all(abs(norm - exact) <= 1e-6 * exact for norm in norms)


# The choice of the dtype.


def lies_in(opt, w):
    """Dtype of the sum after one more micro step, and whether that is in ``.grad``."""
    opt.backward(given((w, torch.ones(w.shape))))
    total = opt.accumulated(w)
    return total.dtype, total is w.grad


@each_backend
@each_half
@each_size
def test_none_is_the_own_dtype_in_windows_of_one_and_fp32_in_longer_ones(backend, dtype, size):
    for accumulation, expected in ((1, (dtype, True)), (2, (torch.float32, False))):
        w = zeros(size, dtype)
        opt = clocked_sgd(w, gradient_accumulation_steps=accumulation, backend=backend)
        assert lies_in(opt, w) == expected


@each_half
@pytest.mark.parametrize("accumulation", [1, 2, 5])
def test_what_is_asked_for_holds_in_windows_of_any_length(dtype, accumulation):
    for asked, expected in ((dtype, (dtype, True)), (torch.float32, (torch.float32, False))):
        w = zeros((3,), dtype)
        opt = clocked_sgd(w, gradient_accumulation_steps=accumulation, accumulate_dtype=asked)
        assert lies_in(opt, w) == expected


@each_backend
@each_half
def test_a_trainer_that_accumulates_by_itself_gets_fp32_sums_where_it_asks(backend, dtype):
    w = zeros((), dtype)
    opt = clocked_sgd(w, accumulate_dtype=torch.float32, backend=backend)
    for _ in range(2):
        for value in (LAST_SUM[dtype], 1, 1, 1):
            given((w, value)).backward()
        assert opt.step().grad_norm == LAST_SUM[dtype] + 3
        opt.zero_grad()


@each_backend
@each_half
@each_size
def test_the_sum_moves_when_the_number_of_micro_steps_does(backend, dtype, size):
    w = zeros(size, dtype)
    opt = clocked_sgd(w, momentum=0.5, backend=backend)
    expected, velocity = 0.0, 0.0
    for accumulation in (1, 4, 1, 3, 2, 1):
        opt.gradient_accumulation_steps = accumulation
        for micro in range(accumulation):
            wanted = (torch.float32, False) if accumulation > 1 else (dtype, True)
            assert lies_in(opt, w) == wanted
            info = opt.step()
            assert info.updated == (micro == accumulation - 1)
        velocity = velocity / 2 + 1
        expected -= velocity
        assert_near(info.grad_norm, math.sqrt(w.numel()), num_roundings=70_001, dtype=torch.float32)
        assert_bit_equal(w.detach(), torch.full(size, expected, dtype=dtype))
    assert opt.clock.update_step == 6


@each_half
def test_a_change_inside_a_window_waits_for_the_next(dtype):
    w = zeros((), dtype)
    opt = clocked_sgd(w, gradient_accumulation_steps=2)
    run_micro_steps(opt, w, [LAST_SUM[dtype]])
    opt.gradient_accumulation_steps = 1
    opt.backward(w * 1)
    assert opt.accumulated(w).item() == LAST_SUM[dtype] + 1
    assert opt.step().updated
    assert lies_in(opt, w) == (dtype, True)


@each_backend
@pytest.mark.parametrize("asked", [None, torch.float32], ids=str)
def test_wider_parameters_keep_their_own_dtype_and_their_grad(backend, asked):
    kinds = [torch.float32, torch.float64, torch.complex64, torch.complex128, *HALVES]
    params = [zeros((3,), dtype) for dtype in kinds]
    opt = clocked_sgd(
        *params, gradient_accumulation_steps=4, accumulate_dtype=asked, backend=backend
    )
    tiny = 2.0**-20  # fp32 keeps 1 + tiny, fp64 keeps 1 + tiny**2
    for value in (1.0, tiny, tiny**2, 0.0):
        opt.backward(given(*((p, torch.full((3,), value, dtype=torch.float64)) for p in params)))
        for p in params:
            total = opt.accumulated(p)
            assert (total is p.grad) == (p.dtype not in HALVES)
            assert total.dtype == (torch.float32 if p.dtype in HALVES else p.dtype)
        opt.step()
    for p in params:
        exact = torch.tensor(1 + tiny + tiny**2, dtype=torch.float64)
        narrow = torch.float32 if p.dtype in (*HALVES, torch.complex64) else p.dtype
        assert_bit_equal(p.detach(), (0 - exact.to(narrow) / 4).to(p.dtype).expand(3))
