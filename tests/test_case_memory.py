"""Case 57: no graph of a micro step outlives it."""

import weakref

import pytest
import torch
from helpers import each_backend

from stepclock_ext import ClockedOptimizer


@each_backend
@pytest.mark.parametrize("size", [3, 300])  # 300 * 300 elements ride
def test_the_activations_of_a_micro_step_are_freed_with_it(backend, size):
    model = torch.nn.Linear(size, size)
    opt = ClockedOptimizer(
        torch.optim.AdamW(model.parameters()), gradient_accumulation_steps=3, backend=backend
    )
    for _ in range(6):
        activation = model(torch.ones(2, size))
        loss = activation.square().mean()
        opt.backward(loss)
        opt.step()
        alive = weakref.ref(activation)
        del activation, loss
        assert alive() is None
