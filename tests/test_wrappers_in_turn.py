"""Whose hook takes a gradient: that of the wrapper in use, also where its settings just changed."""

import gc
import weakref

import pytest
import torch
from helpers import clocked_sgd, run_micro_steps
from tensors import HALVES, dtype_name
from tolerance import assert_bit_equal

from stepclock_ext import ClockedOptimizer

each_half = pytest.mark.parametrize("dtype", HALVES, ids=dtype_name)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=dtype_name)
each_way = pytest.mark.parametrize("plain", [False, True], ids=["opt.backward", "loss.backward"])


def zeros(dtype):
    return torch.nn.Parameter(torch.zeros(3, dtype=dtype))


def train(opt, w, slopes, plain):
    info = None
    for slope in slopes:
        loss = slope * w.sum()
        loss.backward() if plain else opt.backward(loss)
        info = opt.step()
    return info


@pytest.fixture
def no_collector():
    """What only the garbage collector would free stays, as it does for long in a real run."""
    gc.disable()
    yield
    gc.enable()


@each_half
def test_a_dropped_wrapper_is_freed_with_its_sums(dtype):
    w = zeros(dtype)
    opt = clocked_sgd(w, gradient_accumulation_steps=2)
    run_micro_steps(opt, w, [1.0])
    alive = [weakref.ref(opt), weakref.ref(opt.accumulated(w))]
    del opt
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


@each_dtype
@pytest.mark.parametrize("trained", [False, True])
def test_after_a_wrapper_is_dropped_plain_pytorch_finds_its_gradients(no_collector, dtype, trained):
    w = zeros(dtype)
    opt = clocked_sgd(w, gradient_accumulation_steps=2)
    if trained:
        run_micro_steps(opt, w, [1.0, 1.0])
    del opt
    w.sum().backward()
    assert w.grad is not None
    assert w.grad.tolist() == [1.0] * 3


@each_dtype
@each_way
@pytest.mark.parametrize("kept", [False, True], ids=["the old one is dropped", "both are kept"])
@pytest.mark.parametrize("steps", [(4, 2), (4, 1), (1, 4), (1, 1)], ids=str)
def test_the_next_wrapper_of_the_same_parameters_gets_every_gradient(
    no_collector, dtype, plain, kept, steps
):
    w, old, alive = zeros(dtype), None, []
    for accumulation in steps:
        old = ClockedOptimizer(
            torch.optim.SGD([w], lr=1.0), gradient_accumulation_steps=accumulation
        )
        alive.append(old if kept else None)
    info = train(old, w, [2.0] * steps[-1], plain)
    assert info.updated
    assert_bit_equal(w.detach(), torch.full((3,), -2.0, dtype=dtype))


@each_dtype
def test_two_wrappers_that_take_turns_get_the_gradients_of_their_own_windows(dtype):
    w = zeros(dtype)
    inner = torch.optim.SGD([w], lr=1.0)
    opts = [ClockedOptimizer(inner, gradient_accumulation_steps=2) for _ in range(2)]
    for turn in range(4):
        assert train(opts[turn % 2], w, [1.0, 3.0], plain=False).updated
    assert_bit_equal(w.detach(), torch.full((3,), -8.0, dtype=dtype))


@each_dtype
@pytest.mark.parametrize("steps", [(4, 1), (2, 4), (1, 4), (1, 1)], ids=str)
def test_a_gradient_that_is_not_counted_yet_survives_a_change_of_the_window(dtype, steps):
    w = zeros(dtype)
    opt = clocked_sgd(w, gradient_accumulation_steps=steps[0], reduction="sum")
    (2 * w.sum()).backward()
    opt.gradient_accumulation_steps = steps[1]
    info = opt.step()
    if steps[1] > 1:
        info = train(opt, w, [1.0] * (steps[1] - 1), plain=True)
    assert info.updated
    assert_bit_equal(w.detach(), torch.full((3,), -(2.0 + steps[1] - 1), dtype=dtype))


@each_dtype
@pytest.mark.parametrize("way", ["opt.add_param_group", "inner.add_param_group", "loss_scale"])
def test_a_gradient_that_is_not_counted_yet_survives_a_change_of_the_wrapper(dtype, way):
    w, other = zeros(dtype), zeros(dtype)
    opt = clocked_sgd(w, gradient_accumulation_steps=2, reduction="sum")
    (2 * w.sum()).backward()
    if way == "opt.add_param_group":
        opt.add_param_group({"params": [other]})
    elif way == "inner.add_param_group":
        opt.optimizers[0].add_param_group({"params": [other]})
    else:
        opt.loss_scale = None
    opt.step()
    (w + other).sum().backward()
    assert opt.step().updated
    assert_bit_equal(w.detach(), torch.full((3,), -3.0, dtype=dtype))


@each_half
def test_a_window_of_one_takes_no_gradient_away_after_longer_ones(dtype):
    w = zeros(dtype)
    opt = clocked_sgd(w, gradient_accumulation_steps=2)
    run_micro_steps(opt, w, [1.0, 1.0])
    opt.gradient_accumulation_steps = 1
    w.sum().backward()
    assert w.grad.tolist() == [1.0] * 3
    assert opt.step().updated
