"""Case 50: torch.compile round an update, and round a model."""

import pytest
import torch
import torch._dynamo
from helpers import each_backend, snapshot
from tolerance import assert_all_bit_equal
from torch._dynamo.testing import CompileCounter

from stepclock_ext import ClockedOptimizer


@pytest.fixture(autouse=True)
def forgetful_compiler():
    yield
    torch._dynamo.reset()


def train(model, opt, step):
    """Six windows of two, the rate cut after each."""
    for micro in range(12):
        opt.backward(model(torch.full((5, 4), 1.0 + micro)).square().mean())
        if step().updated:
            opt.param_groups[0]["lr"].mul_(0.9)
    assert opt.clock.update_step == 6


def build(optimizer, backend="auto"):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    inner = optimizer(model.parameters(), lr=torch.tensor(0.1))
    return model, ClockedOptimizer(
        inner, gradient_accumulation_steps=2, max_grad_norm=1.0, backend=backend, model=model
    )


@each_backend
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_a_compiled_update_is_the_update_in_at_most_two_graphs(optimizer, backend):
    model, opt = build(optimizer, backend)
    train(model, opt, opt.step)
    expected, counter = snapshot(opt), CompileCounter()
    model, opt = build(optimizer, backend)
    train(model, opt, torch.compile(opt.step, backend=counter))
    assert_all_bit_equal(snapshot(opt), expected)
    assert counter.frame_count <= 2


def test_a_compiled_training_step_is_the_training_step():
    model, opt = build(torch.optim.AdamW)
    train(model, opt, opt.step)
    expected = snapshot(opt)
    model, opt = build(torch.optim.AdamW)
    counter = CompileCounter()

    @torch.compile(backend=counter)
    def train_step(x):
        opt.backward(model(x).square().mean())
        return opt.step()

    for micro in range(12):
        if train_step(torch.full((5, 4), 1.0 + micro)).updated:
            opt.param_groups[0]["lr"].mul_(0.9)
    assert_all_bit_equal(snapshot(opt), expected)
    assert 1 <= counter.frame_count <= 2


def test_a_compiled_model_trains_as_the_model_does():
    model, opt = build(torch.optim.AdamW)
    train(model, opt, opt.step)
    expected, counter = snapshot(opt), CompileCounter()
    model, opt = build(torch.optim.AdamW)
    train(torch.compile(model, backend=counter), opt, opt.step)
    assert_all_bit_equal(snapshot(opt), expected)
    assert counter.frame_count == 1
