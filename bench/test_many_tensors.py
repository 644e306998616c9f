"""Many small tensors, the shape of LoRA: 2,000 tensors of 500 elements.

Here the bytes are few (1 M parameters) and what counts is the work per tensor: Python, reading
addresses, one kernel for all of them.
"""

from __future__ import annotations

from typing import Any

import torch
from interleave import Race, Rival
from workloads import (
    ADAM_SCALARS,
    OursLoop,
    PlainLoop,
    make_gradients,
    make_parameters,
    update_rival,
)

from stepclock_ext import ops

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


class BareOps:
    """The ops of one update, called directly: addresses, kernels, and dropping the gradients."""

    def __init__(self, loop: OursLoop) -> None:
        self.loop = loop
        self.params = list(loop.params)
        self.layout = ops.Layout.of(ops.make_backend("cpu"), self.params)
        self.slots = ops.make_slots(self.layout.num_slots)
        self.stats = ops.make_stats()
        state = loop.optimizer.state
        columns = [
            [state[p][key] for p in self.params] for key in ("step", "exp_avg", "exp_avg_sq")
        ]
        self.states = ops.AdamStates(columns[0], columns[1], columns[2], None)
        self.scalars = ADAM_SCALARS

    def update(self) -> None:
        """What the wrapper's update comes down to."""
        grads = ops.gather_gradients(self.params, self.layout)
        assert grads is not None
        ops.sum_squares_(self.slots, grads, self.layout)
        ops.coefficient_(self.stats, self.slots, self.layout, divisor=1.0, max_norm=1.0)
        ops.adam_(self.params, self.states, grads, self.stats, self.layout, self.scalars)
        self.layout.release("ACCUMULATOR")
        del grads
        for p in self.params:
            p.grad = None


def test_what_the_wrapper_itself_costs(benchmark: Any) -> None:
    """Tensors of two elements: the kernels have nothing to do, so this is Python and addresses."""
    params = make_parameters(NUM_TENSORS, 2)
    ours = OursLoop(params, make_gradients(params), micro_steps=1)
    ours.prepare()
    ours.update()
    bare = BareOps(ours)

    def prepare() -> None:
        ours.optimizer.discard()
        ours.prepare()

    moved = 64 * NUM_TENSORS
    race = Race(
        [
            Rival("ours", prepare, ours.update, moved),
            Rival("the same ops, called directly", prepare, bare.update, moved),
        ],
        ROUNDS,
    )
    race.run(benchmark)
    own = race.median_ms("ours") - race.median_ms("the same ops, called directly")
    benchmark.extra_info["notes"] = [f"the wrapper's own Python a window: {own:.2f} ms"]
