"""fp32 sums whatever way a gradient comes: twice in a micro step, not at all, late, by hand."""

import pytest
import torch
from helpers import SIZES, clocked_sgd, each_backend, given, parameter, run_micro_steps
from tensors import HALVES, dtype_name
from tolerance import assert_bit_equal
from torch.utils.checkpoint import checkpoint

from stepclock_ext import ClockedOptimizer

each_half = pytest.mark.parametrize("dtype", HALVES, ids=dtype_name)
each_size = pytest.mark.parametrize("size", SIZES, ids=str)
each_way = pytest.mark.parametrize("plain", [False, True], ids=["opt.backward", "loss.backward"])
# The first number to which its dtype cannot add one.
LAST_SUM = {torch.bfloat16: 256.0, torch.float16: 2048.0}


def zeros(size, dtype):
    return torch.nn.Parameter(torch.zeros(size, dtype=dtype))


def backward(opt, loss, plain):
    loss.backward() if plain else opt.backward(loss)


def assert_sum(opt, p, value):
    total = opt.accumulated(p)
    assert p.grad is None
    assert_bit_equal(total, torch.full(p.shape, float(value)))


# Several gradients in one micro step.


@each_backend
@each_half
@each_size
@each_way
@pytest.mark.parametrize("doubled", [0, 1, 2])
def test_two_backwards_in_one_micro_step_are_added_exactly(backend, dtype, size, plain, doubled):
    w, last = zeros(size, dtype), LAST_SUM[dtype]
    opt = clocked_sgd(w, gradient_accumulation_steps=3, reduction="sum", backend=backend)
    total = 0.0
    for micro in range(3):
        grads = [last, 1.0] if micro == doubled else [0.5]
        for grad in grads:
            backward(opt, given((w, torch.full(size, grad))), plain)
            total += grad
            assert_sum(opt, w, total)
        info = opt.step()
    exact = torch.full((w.numel(),), last + 2, dtype=torch.float64).norm().item()
    assert info.grad_norm == pytest.approx(exact, rel=1e-6)  # without the one: 4e-3 or 5e-4
    assert_bit_equal(w.detach(), torch.full(size, -(last + 2)).to(dtype))


@each_backend
@each_half
@each_size
@each_way
@pytest.mark.parametrize("shared_micro", [0, 1])
def test_a_parameter_that_reentrant_checkpoints_hit_twice_is_added_exactly(
    backend, dtype, size, plain, shared_micro
):
    w, last, hits = zeros(size, dtype), LAST_SUM[dtype], []
    w.register_post_accumulate_grad_hook(lambda p: hits.append(p.grad.flatten()[0].item()))
    opt = clocked_sgd(w, gradient_accumulation_steps=2, reduction="sum", backend=backend)
    for micro in range(2):
        slopes = [last, 1.0] if micro == shared_micro else [2.0]
        loss = torch.zeros((), dtype=dtype)
        for slope in slopes:
            x = torch.full(size, slope, dtype=dtype, requires_grad=True)
            loss = loss + checkpoint(lambda x: x * w, x, use_reentrant=True).sum()
        backward(opt, loss, plain)
        opt.accumulated(w)
        if micro == 0:
            opt.step()
    assert sorted(hits) == [1.0, 2.0, last]  # one by one: autograd did not add them up
    assert_sum(opt, w, last + 3)
    assert opt.step().updated
    assert_bit_equal(w.detach(), torch.full(size, -(last + 3)).to(dtype))


# Parameters that take no part in some micro steps.


@each_backend
@each_half
@each_size
@each_way
def test_a_sum_is_that_of_the_micro_steps_the_parameter_took_part_in(backend, dtype, size, plain):
    last = LAST_SUM[dtype]
    parts = [{0, 1, 2}, {0}, {0, 1}, {1}, {2}, {1, 2}, set()]
    params = [zeros(size, dtype) for _ in parts]
    opt = ClockedOptimizer(
        torch.optim.SGD(params, lr=1.0, weight_decay=0.5),
        gradient_accumulation_steps=3,
        reduction="sum",
        backend=backend,
    )
    with torch.no_grad():
        for p in params:
            p.fill_(1.0)
    sums = [0.0] * len(parts)
    for micro, slope in enumerate((last, 1.0, 3.0)):
        used = [row for row, part in enumerate(parts) if micro in part]
        backward(opt, given(*((params[row], torch.full(size, slope)) for row in used)), plain)
        for row in used:
            sums[row] += slope
        for p, total, part in zip(params, sums, parts, strict=True):
            if min(part, default=9) <= micro:
                assert_sum(opt, p, total)
            else:
                assert opt.accumulated(p) is None
        info = opt.step()
    numel = params[0].numel()
    exact = sum(total * total for total in sums) ** 0.5 * numel**0.5
    assert info.grad_norm == pytest.approx(exact, rel=1e-6)
    for p, total, part in zip(params, sums, parts, strict=True):
        value = 1.0 - (total + 0.5) if part else 1.0  # no decay without a gradient
        assert_bit_equal(p.detach(), torch.full(size, value).to(dtype))


@each_backend
@each_half
def test_a_parameter_that_is_frozen_and_unfrozen_counts_while_it_is_not(backend, dtype):
    p, q = zeros((3,), dtype), zeros((3,), dtype)
    inner = torch.optim.AdamW([p, q], lr=0.1)
    opt = ClockedOptimizer(inner, gradient_accumulation_steps=2, backend=backend)
    for frozen in (False, True, True, False, True, False):
        p.requires_grad_(not frozen)
        before = p.detach().clone()
        run_micro_steps(opt, (p + q if not frozen else q), [1, 2])
        assert torch.equal(p, before) == frozen
    assert (inner.state[p]["step"].item(), inner.state[q]["step"].item()) == (3, 6)


@each_backend
@each_half
@each_size
def test_a_parameter_unfrozen_after_the_wrapper_was_made_is_added_exactly(backend, dtype, size):
    w, other, last = zeros(size, dtype), zeros(size, dtype), LAST_SUM[dtype]
    w.requires_grad_(False)
    opt = clocked_sgd(w, other, gradient_accumulation_steps=2, reduction="sum", backend=backend)
    w.requires_grad_(True)
    for micro in range(2):
        for slope in (last, 1.0):  # two backwards in the first micro step, too
            opt.backward(given((w, torch.full(size, slope))))
        if micro == 0:
            opt.step()
    assert_sum(opt, w, 2 * last + 2)


# Gradients that come by hand.


@each_backend
@each_half
@each_size
def test_gradients_assigned_by_hand_are_summed_in_fp32(backend, dtype, size):
    w, last = zeros(size, dtype), LAST_SUM[dtype]
    opt = clocked_sgd(w, gradient_accumulation_steps=3, reduction="sum", backend=backend)
    for micro, value in enumerate((last, 1.0, 1.0)):
        w.grad = torch.full(size, value, dtype=dtype)
        if micro < 2:
            opt.step()
    assert_sum(opt, w, last + 2)
    assert opt.step().updated
    assert_bit_equal(w.detach(), torch.full(size, -(last + 2)).to(dtype))


@each_half
@each_way
def test_a_gradient_by_hand_and_one_by_autograd_are_one_sum(dtype, plain):
    w, last = zeros((3,), dtype), LAST_SUM[dtype]
    opt = clocked_sgd(w, gradient_accumulation_steps=2, reduction="sum")
    backward(opt, given((w, torch.full((3,), last))), plain)
    w.grad = torch.ones(3, dtype=dtype)
    opt.step()
    w.grad = torch.ones(3, dtype=dtype).expand(3).flip(0)
    opt.step()
    assert_bit_equal(w.detach(), torch.full((3,), -(last + 2)).to(dtype))


@each_half
def test_a_gradient_by_hand_that_is_not_counted_yet_stops_the_end_of_an_epoch(dtype):
    w = zeros((), dtype)
    opt = clocked_sgd(w, gradient_accumulation_steps=2)
    run_micro_steps(opt, w, [1])
    w.grad = torch.ones((), dtype=dtype)
    with pytest.raises(RuntimeError, match="not yet counted"):
        opt.end_epoch()
    assert opt.step().updated
    assert w.item() == -1.0


# Groups.


@each_backend
@each_half
def test_parameters_added_between_windows_are_summed_like_the_others(backend, dtype):
    p, q = parameter(0.0, dtype=dtype), zeros((3,), dtype)
    opt = clocked_sgd(p, gradient_accumulation_steps=2, reduction="sum", backend=backend)
    run_micro_steps(opt, p, [1.0, 1.0])
    opt.add_param_group({"params": [q], "lr": 0.5})
    for slope in (LAST_SUM[dtype], 1.0):
        opt.backward(given((p, 1.0), (q, torch.full((3,), slope))))
        assert (p.grad, q.grad) == (None, None)
        if slope != 1.0:
            opt.step()
    assert_sum(opt, q, LAST_SUM[dtype] + 1)
    opt.step()
    assert p.item() == -4.0


# Tails, and windows that are dropped.


@each_backend
@each_half
@each_size
@each_way
def test_a_tail_is_the_mean_of_what_it_holds(backend, dtype, size, plain):
    w, last = zeros(size, dtype), LAST_SUM[dtype]
    opt = clocked_sgd(w, gradient_accumulation_steps=8, backend=backend)
    for slope in (last, 1.0, 3.0, 4.0):
        backward(opt, given((w, torch.full(size, slope))), plain)
        opt.step()
    info = opt.end_epoch()
    exact = (last + 8) / 4
    assert info.grad_norm == pytest.approx(exact * w.numel() ** 0.5, rel=1e-6)
    assert_bit_equal(w.detach(), torch.full(size, -exact).to(dtype))
    assert opt.accumulated(w) is None


@each_half
@each_way
def test_a_tail_that_is_carried_goes_on_to_the_digit(dtype, plain):
    w, last = zeros((3,), dtype), LAST_SUM[dtype]
    opt = clocked_sgd(w, gradient_accumulation_steps=4, tail="carry", reduction="sum")
    for epoch in range(2):
        for slope in (last, 1.0):
            backward(opt, given((w, torch.full((3,), slope))), plain)
            if (epoch, slope) != (1, 1.0):
                opt.step()
        if epoch == 0:
            opt.end_epoch()
    assert_sum(opt, w, 2 * last + 2)
    assert opt.step().updated


@each_backend
@each_half
@each_size
@each_way
@pytest.mark.parametrize("how", ["drop", "discard", "discard, uncounted", "zero_grad"])
def test_what_is_dropped_is_in_no_later_window(backend, dtype, size, plain, how):
    w = zeros(size, dtype)
    opt = clocked_sgd(w, gradient_accumulation_steps=2, tail="drop", backend=backend)
    backward(opt, given((w, torch.full(size, 99.0))), plain)
    if how in ("drop", "discard"):
        opt.step()
    if how == "drop":
        opt.end_epoch()
    elif how == "zero_grad" and plain:
        opt.zero_grad()
    else:
        opt.discard()
    assert opt.accumulated(w) is None
    for slope in (1.0, 3.0):
        backward(opt, given((w, torch.full(size, slope))), plain)
        info = opt.step()
    assert info.updated
    assert_bit_equal(w.detach(), torch.full(size, -2.0, dtype=dtype))


@each_half
def test_zero_grad_inside_a_window_changes_nothing(dtype):
    w = zeros((3,), dtype)
    model = torch.nn.ParameterList([w])
    opt = clocked_sgd(w, gradient_accumulation_steps=2)
    run_micro_steps(opt, w, [3.0])
    opt.zero_grad()
    model.zero_grad()
    run_micro_steps(opt, w, [9.0])
    assert_bit_equal(w.detach(), torch.full((3,), -2.0, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=dtype_name)
def test_an_epoch_may_end_after_zero_grad_has_cleared_a_backward(dtype):
    w = zeros((3,), dtype)
    opt = clocked_sgd(w, gradient_accumulation_steps=2)
    w.sum().backward()
    opt.zero_grad()
    assert opt.accumulated(w) is None
    info = opt.end_epoch()
    assert (info.updated, info.skipped, w.count_nonzero()) == (False, False, 0)
