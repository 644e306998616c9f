"""From complete gradients to updated parameters: 50 M fp32 parameters in 64 tensors.

Loss scale on, clip binding. Bytes a parameter: the plain loop 48 (unscale 8, norm 4, clip 8, fused
AdamW 28); ours 28 where the norm rode on the last micro step, 32 where it is one read pass; 12 more
each with the last accumulation.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triad
from interleave import Race, Rival
from workloads import (
    ADAM_SCALARS,
    MICRO_STEPS,
    OursLoop,
    PlainLoop,
    last_micro_step_rival,
    make_gradients,
    make_parameters,
    update_rival,
)

from stepclock_ext import ops

NUM_TENSORS = 64
NUM_ELEMENTS = 781_250
NUM_PARAMETERS = NUM_TENSORS * NUM_ELEMENTS
ROUNDS = 15


def _loops(micro_steps: int) -> tuple[OursLoop, PlainLoop]:
    ours_params = make_parameters(NUM_TENSORS, NUM_ELEMENTS)
    plain_params = make_parameters(NUM_TENSORS, NUM_ELEMENTS)
    grads = make_gradients(ours_params)
    ours = OursLoop(ours_params, grads, micro_steps=micro_steps)
    return ours, PlainLoop(plain_params, grads, fused=True)


def _check_equal(ours: OursLoop, plain: PlainLoop) -> None:
    """One update each from equal parameters and gradients ends in equal parameters."""
    ours.prepare()
    ours.update()
    plain.prepare()
    plain.update()
    for mine, other in zip(ours.params, plain.params, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("micro_steps", [MICRO_STEPS, 1], ids=["accumulated", "windows_of_one"])
def test_update_stretch_against_the_best_plain_loop(benchmark: Any, micro_steps: int) -> None:
    ours, plain = _loops(micro_steps)
    _check_equal(ours, plain)
    bytes_each = 28 if micro_steps > 1 else 32
    rivals = [
        update_rival("ours", ours, bytes_each * NUM_PARAMETERS),
        update_rival("unscale + clip + fused AdamW", plain, 48 * NUM_PARAMETERS),
    ]
    Race(rivals, ROUNDS).run(benchmark)


def test_update_stretch_against_the_default_loop(benchmark: Any) -> None:
    ours, _ = _loops(MICRO_STEPS)
    params = make_parameters(NUM_TENSORS, NUM_ELEMENTS)
    plain = PlainLoop(params, ours.grads, fused=False)
    _check_equal(ours, plain)
    rivals = [
        update_rival("ours", ours, 28 * NUM_PARAMETERS),
        update_rival("unscale + clip + default AdamW", plain, 48 * NUM_PARAMETERS),
    ]
    Race(rivals, ROUNDS).run(benchmark)


def test_last_accumulation_and_update(benchmark: Any) -> None:
    ours, plain = _loops(MICRO_STEPS)
    _check_equal(ours, plain)
    rivals = [
        last_micro_step_rival("ours", ours, 40 * NUM_PARAMETERS),
        last_micro_step_rival("add + unscale + clip + fused AdamW", plain, 60 * NUM_PARAMETERS),
    ]
    Race(rivals, ROUNDS).run(benchmark)


def test_update_kernel_against_a_triad_of_the_same_mix(benchmark: Any) -> None:
    params = [p.detach() for p in make_parameters(NUM_TENSORS, NUM_ELEMENTS)]
    moments = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    steps = [torch.zeros(()) for _ in params]
    grads = [torch.randn_like(p) for p in params]
    layout = ops.Layout.of(ops.make_backend("cpu"), params)
    states = ops.AdamStates(steps, moments[0], moments[1], None)
    scalars = ADAM_SCALARS
    stats = ops.make_stats()

    def nothing() -> None:
        pass

    rivals = [
        Rival(
            "AdamW kernel",
            nothing,
            lambda: ops.adam_(params, states, grads, stats, layout, scalars),
            28 * NUM_PARAMETERS,
        ),
        Rival(
            "triad of 4 reads, 3 writes",
            nothing,
            lambda: triad.adam_mix(params, moments[0], moments[1], grads),
            28 * NUM_PARAMETERS,
        ),
    ]
    race = Race(rivals, ROUNDS)
    race.run(benchmark)
    share = race.median_ms("triad of 4 reads, 3 writes") / race.median_ms("AdamW kernel")
    benchmark.extra_info["notes"] = [f"share of the triad's bandwidth: {100 * share:.0f} %"]


def test_accumulate_with_norm_against_accumulate_alone(benchmark: Any) -> None:
    sums = [p.detach() for p in make_parameters(NUM_TENSORS, NUM_ELEMENTS)]
    grads = [torch.randn_like(p) * 1e-3 for p in sums]
    layout = ops.Layout.of(ops.make_backend("cpu"), sums)
    slots = ops.make_slots(layout.num_slots)

    def nothing() -> None:
        pass

    moved = 12 * NUM_PARAMETERS
    rivals = [
        Rival(
            "with norm", nothing, lambda: ops.accumulate_(sums, grads, layout, slots=slots), moved
        ),
        Rival("alone", nothing, lambda: ops.accumulate_(sums, grads, layout), moved),
        Rival("torch._foreach_add_", nothing, lambda: torch._foreach_add_(sums, grads), moved),
    ]
    Race(rivals, ROUNDS).run(benchmark)
