"""fp32 sums beside hooks of others, and after a backward that failed."""

import pytest
import torch
from helpers import SIZES, clocked_sgd, each_backend, given, run_micro_steps
from tensors import HALVES, dtype_name
from test_behaviours import Fails
from tolerance import assert_bit_equal

each_half = pytest.mark.parametrize("dtype", HALVES, ids=dtype_name)
each_size = pytest.mark.parametrize("size", SIZES, ids=str)
each_way = pytest.mark.parametrize("plain", [False, True], ids=["opt.backward", "loss.backward"])


def zeros(size, dtype):
    return torch.nn.Parameter(torch.zeros(size, dtype=dtype))


def backward(opt, loss, plain):
    loss.backward() if plain else opt.backward(loss)


@each_backend
@each_half
@each_size
def test_a_hook_made_before_the_wrapper_sees_and_may_change_each_gradient(backend, dtype, size):
    w, seen = zeros(size, dtype), []

    def halve(p):
        seen.append((p.grad.dtype, p.grad.flatten()[0].item()))
        p.grad.mul_(0.5)

    w.register_post_accumulate_grad_hook(halve)
    opt = clocked_sgd(w, gradient_accumulation_steps=3, reduction="sum", backend=backend)
    for slope in (2.0, 4.0, 8.0):
        opt.backward(given((w, torch.full(size, slope))))
        opt.step()
    assert seen == [(dtype, 2.0), (dtype, 4.0), (dtype, 8.0)]
    assert_bit_equal(w.detach(), torch.full(size, -7.0, dtype=dtype))


@each_half
@each_size
@each_way
@pytest.mark.parametrize("bad_micro", [0, 1, 2])
def test_a_hook_that_frees_a_gradient_is_a_loud_error_and_discard_a_way_on(
    dtype, size, plain, bad_micro
):
    w, other, micros = zeros(size, dtype), zeros(size, dtype), []

    def free(p):
        micros.append(None)
        if len(micros) == bad_micro + 1:
            p.grad = None

    w.register_post_accumulate_grad_hook(free)
    opt = clocked_sgd(w, other, gradient_accumulation_steps=3)
    grad = torch.ones(size)
    with pytest.raises(RuntimeError, match="a hook took the gradient of 'group 0, parameter 0'"):
        for _ in range(3):
            backward(opt, given((w, grad), (other, grad)), plain)
            opt.step()
    assert (w.count_nonzero(), other.count_nonzero(), opt.clock.update_step) == (0, 0, 0)
    opt.discard()
    for _ in range(3):
        backward(opt, given((w, grad), (other, grad)), plain)
        opt.step()
    assert_bit_equal(w.detach(), -grad.to(dtype))


@each_half
@each_size
@pytest.mark.parametrize("failing_micro", [0, 1, 2])
def test_a_window_with_a_failed_backward_is_cleared_and_repeated(dtype, size, failing_micro):
    p, q = zeros(size, dtype), zeros(size, dtype)
    opt = clocked_sgd(p, q, gradient_accumulation_steps=3)
    run_micro_steps(opt, p, [64.0] * failing_micro)
    with pytest.raises(ArithmeticError):
        opt.backward(Fails.apply(q).sum() + given((p, torch.full(size, 99.0))))
    assert opt.accumulated(p) is not None  # it had arrived
    with pytest.raises(RuntimeError, match=r"discard\(\)"):
        opt.step()
    assert list(opt.discard()) == list(range(1, failing_micro + 1))
    assert opt.accumulated(p) is None
    for slope in (1.0, 2.0, 6.0):
        opt.backward(given((p, torch.full(size, slope)), (q, torch.full(size, slope))))
        opt.step()
    assert_bit_equal(p.detach(), torch.full(size, -3.0, dtype=dtype))
    assert_bit_equal(q.detach(), torch.full(size, -3.0, dtype=dtype))
