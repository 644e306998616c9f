"""Many small tensors, the shape of LoRA: 2,000 tensors of 500 elements.

Here the bytes are few (1 M parameters) and what counts is the work per tensor: Python, reading
addresses, one kernel for all of them.
"""

from __future__ import annotations

from typing import Any

import torch
from interleave import Race
from workloads import OursLoop, PlainLoop, make_gradients, make_parameters, update_rival

NUM_TENSORS = 2000
NUM_ELEMENTS = 500
NUM_PARAMETERS = NUM_TENSORS * NUM_ELEMENTS
ROUNDS = 60


def test_update_stretch_of_2000_small_tensors(benchmark: Any) -> None:
    params = make_parameters(NUM_TENSORS, NUM_ELEMENTS)
    grads = make_gradients(params)
    ours = OursLoop(params, grads, micro_steps=2)
    plain = PlainLoop(make_parameters(NUM_TENSORS, NUM_ELEMENTS), grads, fused=True)
    ours.prepare()
    ours.update()
    plain.prepare()
    plain.update()
    torch.testing.assert_close(ours.params[7], plain.params[7], rtol=1e-5, atol=1e-6)
    rivals = [
        update_rival("ours", ours, 32 * NUM_PARAMETERS),
        update_rival("unscale + clip + fused AdamW", plain, 48 * NUM_PARAMETERS),
    ]
    Race(rivals, ROUNDS).run(benchmark)


def test_what_the_wrapper_itself_costs(benchmark: Any) -> None:
    """Tensors of one element: the kernels have nothing to do, so this is Python and addresses."""
    params = make_parameters(NUM_TENSORS, 1)
    ours = OursLoop(params, make_gradients(params), micro_steps=1)
    Race([update_rival("ours", ours, 32 * NUM_TENSORS)], ROUNDS).run(benchmark)
