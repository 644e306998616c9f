"""The update of bf16 parameters with fp32 moments: 50 M of them in 64 tensors, by direct calls.

Bytes a parameter: AdamW 24 (reads parameter 2, sum 4, moments 8; writes 2 and 8), 28 with int16
remainders as masters, 36 with an fp32 average; accumulation of bf16 gradients in fp32 10, 6 where
it stores. Separate passes of torch, masters in fp32: 54, 66 with an average, 6 more to widen sums
that are bf16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triad
from interleave import Race, Rival
from torch import Tensor
from workloads import ADAM_SCALARS, MAX_NORM, MICRO_STEPS, SCALE

from stepclock_ext import ops

NUM_TENSORS = 64
NUM_ELEMENTS = 781_250
NUM_PARAMETERS = NUM_TENSORS * NUM_ELEMENTS
ROUNDS = 15
DIVISOR = SCALE * MICRO_STEPS
AVERAGE_WEIGHT = 1e-3
# Which companions move along; how many bytes the kernel then moves for each parameter.
COMPANIONS = {"plain": 24, "remainders": 28, "remainders_and_average": 36}


def nothing() -> None:
    """What needs no preparation."""


def random_tensors(seed: int, scale: float, dtype: torch.dtype) -> list[Tensor]:
    """Equal tensors for equal seeds."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(NUM_ELEMENTS, generator=generator).mul_(scale).to(dtype)
        for _ in range(NUM_TENSORS)
    ]


def zeros(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """One tensor of zeros for each parameter."""
    return [torch.zeros(NUM_ELEMENTS, dtype=dtype) for _ in range(NUM_TENSORS)]


@dataclass
class Ours:
    """bf16 parameters and all that moves with them, for ``ops.adam_``."""

    sums: list[Tensor]
    with_masters: bool
    with_averages: bool
    backend: str = "cpu"

    def __post_init__(self) -> None:
        count = len(self.sums)
        values = random_tensors(0, 1.0, torch.float32)[:count]
        if self.with_masters:
            parts = [ops.split(value) for value in values]
            self.params = [half for half, _ in parts]
            self.masters = [remainder for _, remainder in parts]
        else:
            self.params = [value.bfloat16() for value in values]
        self.averages = values if self.with_averages else None
        self.states = ops.AdamStates(
            [torch.zeros(()) for _ in self.sums], zeros()[:count], zeros()[:count], None
        )
        self.companions = ops.Companions(
            masters=self.masters if self.with_masters else None,
            averages=self.averages,
            average_weight=AVERAGE_WEIGHT,
        )
        self.layout = ops.Layout.of(
            ops.make_backend(self.backend), self.params, accumulate_dtype=self.sums[0].dtype
        )
        self.layout.adopt_state_dtypes(self.states.exp_avgs)
        self.slots = ops.make_slots(self.layout.num_slots)
        self.stats = ops.make_stats()
        ops.sum_squares_(self.slots, self.sums, self.layout)

    def update(self) -> None:
        """From sums whose norm is in the slots to updated parameters."""
        ops.coefficient_(self.stats, self.slots, self.layout, divisor=DIVISOR, max_norm=MAX_NORM)
        self.adam()

    def adam(self) -> None:
        """The kernel alone, with the coefficient that is there."""
        ops.adam_(
            self.params,
            self.states,
            self.sums,
            self.stats,
            self.layout,
            ADAM_SCALARS,
            self.companions,
        )

    def weights(self) -> list[Tensor]:
        """What the parameters are worth, in fp32."""
        if not self.with_masters:
            return [p.float() for p in self.params]
        return [ops.join(*parts) for parts in zip(self.params, self.masters, strict=True)]

    def written(self) -> list[list[Tensor]]:
        """All that an update writes, in fp32."""
        written = [self.weights(), self.states.exp_avgs, self.states.exp_avg_sqs]
        return written if self.averages is None else [*written, self.averages]


def check_against_reference(ours: Ours) -> None:
    """Updates once; the first row must then hold what the reference computes."""
    reference = Ours(ours.sums[:1], ours.with_masters, ours.with_averages, "reference")
    for each in (ours, reference):
        each.adam()
    # fp32 values an ulp or two apart (the order of operations) can round to other bf16 ones.
    tolerance = 1e-6 if ours.with_masters else 2.0**-7
    pairs = zip(ours.written(), reference.written(), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine[0], theirs[0], rtol=tolerance, atol=1e-9)


@pytest.mark.parametrize("companions", COMPANIONS)
def test_update_kernel_against_a_triad_of_the_same_mix(benchmark: Any, companions: str) -> None:
    bytes_each = COMPANIONS[companions]
    sums = random_tensors(1, 1.0, torch.float32)
    ours = Ours(sums, companions != "plain", companions == "remainders_and_average")
    check_against_reference(ours)
    moments = ours.states.exp_avgs, ours.states.exp_avg_sqs

    def mix() -> None:
        triad.adam_half_mix(
            ours.params,
            *moments,
            sums,
            remainders=ours.masters if ours.with_masters else None,
            averages=ours.averages,
        )

    moved = bytes_each * NUM_PARAMETERS
    rivals = [
        Rival(f"AdamW kernel, {bytes_each} bytes", nothing, ours.adam, moved),
        Rival(f"triad, {bytes_each} bytes", nothing, mix, moved),
    ]
    race = Race(rivals, ROUNDS)
    race.run(benchmark)
    share = race.median_ms(rivals[1].name) / race.median_ms(rivals[0].name)
    benchmark.extra_info["notes"] = [f"share of the triad's bandwidth: {100 * share:.0f} %"]


class Separate:
    """fp32 masters, and a pass of torch for each job.

    Bytes a parameter: widen bf16 sums 6, unscale 8, norm 4, clip 8, fused AdamW 28, copy down 6,
    average 12.
    """

    def __init__(self, sums: list[Tensor], *, with_averages: bool) -> None:
        self.sums = sums
        values = random_tensors(0, 1.0, torch.float32)
        self.params = [value.bfloat16() for value in values]
        self.averages = [value.clone() for value in values] if with_averages else None
        self.masters = [value.requires_grad_() for value in values]
        self.grads = zeros()
        for master, grad in zip(self.masters, self.grads, strict=True):
            master.grad = grad
        self.optimizer = torch.optim.AdamW(self.masters, lr=ADAM_SCALARS.lr, fused=True)

    def prepare(self) -> None:
        """fp32 sums are gradients as they are; bf16 ones are widened on the clock."""
        if self.sums[0].dtype == torch.float32:
            torch._foreach_copy_(self.grads, self.sums)

    @torch.no_grad()
    def update(self) -> None:
        """From sums to updated masters, parameters and averages."""
        if self.sums[0].dtype != torch.float32:
            torch._foreach_copy_(self.grads, self.sums)
        torch._foreach_mul_(self.grads, 1.0 / DIVISOR)
        torch.nn.utils.clip_grad_norm_(self.masters, MAX_NORM, foreach=True)
        self.optimizer.step()
        torch._foreach_copy_(self.params, self.masters)
        if self.averages is not None:
            torch._foreach_lerp_(self.averages, self.masters, AVERAGE_WEIGHT)


def check_close(ours: Ours, separate: Separate) -> None:
    """One update each from equal values ends in equal masters, parameters and averages."""
    ours.update()
    separate.prepare()
    separate.update()
    pairs = [(ours.weights(), separate.masters)]
    if ours.averages is not None:
        assert separate.averages is not None
        pairs.append((ours.averages, separate.averages))
    for mine, theirs in pairs:
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=1e-5, atol=1e-6)
    for one, other in zip(ours.params, separate.params, strict=True):
        torch.testing.assert_close(one, other, rtol=2.0**-7, atol=1e-6)  # masters an ulp apart


@pytest.mark.parametrize("with_averages", [True, False], ids=["average", "no_average"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_update_stretch_against_separate_passes(
    benchmark: Any, dtype: torch.dtype, with_averages: bool
) -> None:
    sums = random_tensors(1, DIVISOR, dtype)
    ours = Ours(sums, with_masters=True, with_averages=with_averages)
    separate = Separate(sums, with_averages=with_averages)
    check_close(ours, separate)
    mine = 24 + dtype.itemsize + 8 * with_averages
    theirs = 54 + 6 * (dtype == torch.bfloat16) + 12 * with_averages
    rivals = [
        Rival(f"ours, {mine} bytes", nothing, ours.update, mine * NUM_PARAMETERS),
        Rival(
            f"separate passes, {theirs} bytes",
            separate.prepare,
            separate.update,
            theirs * NUM_PARAMETERS,
        ),
    ]
    Race(rivals, ROUNDS).run(benchmark)


@pytest.mark.parametrize("store", [False, True], ids=["add", "store"])
def test_accumulate_bf16_gradients_in_fp32(benchmark: Any, store: bool) -> None:
    """torch widens a gradient into a tensor of its own where it adds; that is not counted."""
    sums = random_tensors(1, 1.0, torch.float32)
    grads = random_tensors(2, 1e-3, torch.bfloat16)
    layout = ops.Layout.of(ops.make_backend("cpu"), grads, accumulate_dtype=torch.float32)
    slots = ops.make_slots(layout.num_slots)

    def add_each() -> None:
        for total, grad in zip(sums, grads, strict=True):
            total.add_(grad)

    foreach = torch._foreach_copy_ if store else torch._foreach_add_
    expected = grads[0].float() if store else sums[0] + grads[0].float()
    ops.accumulate_(sums, grads, layout, slots=slots, store=store)
    torch.testing.assert_close(sums[0], expected, rtol=0.0, atol=0.0)
    norm = torch.stack([total.double().norm() for total in sums]).norm()
    torch.testing.assert_close(slots.sum().sqrt(), norm, rtol=1e-12, atol=0.0)
    bytes_each = 6 if store else 10
    ways = {
        "with norm": lambda: ops.accumulate_(sums, grads, layout, slots=slots, store=store),
        "alone": lambda: ops.accumulate_(sums, grads, layout, store=store),
        foreach.__name__: lambda: foreach(sums, grads),
    }
    if not store:
        ways["add_ of each"] = add_each
    rivals = [
        Rival(f"{name}, {bytes_each} bytes", nothing, run, bytes_each * NUM_PARAMETERS)
        for name, run in ways.items()
    ]
    Race(rivals, ROUNDS).run(benchmark)
