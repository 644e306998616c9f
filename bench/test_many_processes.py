"""Two processes: the update stretch under DDP, a reduced micro step, whole windows.

Bytes a parameter of the update stretch: the plain loop 48 (unscale 8, norm 4, clip 8, fused AdamW
28); ours 32, as DDP replaces what the norm could have ridden on. In the other races bytes are those
that a rank hands to collectives.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from interleave import Rival
from joint_loops import BATCH, NUM_PARAMETERS, WIDTH, DdpLoop, OursLoop, way_apart
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from two_ranks import SHRINK, JointRace, report
from workloads import MAX_NORM, SCALE, PlainLoop, given_loss, make_gradients, make_parameters

from stepclock_ext import ClockedOptimizer, LossScale

NUM_TENSORS = 64
NUM_ELEMENTS = 781_250 // SHRINK
ROUNDS = 15
Outcome = tuple[list[dict[str, Any]], list[str]]


# ---- The update stretch under DDP --------------------------------------------------------------


class GivenModel(torch.nn.Module):
    """Parameters whose gradients are given."""

    def __init__(self, grads: list[Tensor]) -> None:
        super().__init__()
        self.params = torch.nn.ParameterList(make_parameters(NUM_TENSORS, NUM_ELEMENTS))
        self.grads = grads

    def forward(self) -> Tensor:
        return given_loss(list(self.params), self.grads)


class PlainUnderDdp(PlainLoop):
    """GradScaler, clip and fused AdamW behind DDP."""

    def __init__(self, grads: list[Tensor]) -> None:
        model = GivenModel(grads)
        super().__init__(list(model.params), grads, fused=True)
        self.ddp = DistributedDataParallel(model)

    def prepare(self) -> None:
        """Gradients complete: DDP's mean over ranks, scaled."""
        self.scaler.scale(self.ddp()).backward()


class OursUnderDdp:
    """ClockedOptimizer, which drives DDP."""

    def __init__(self, grads: list[Tensor]) -> None:
        model = GivenModel(grads)
        self.params = list(model.params)
        self.ddp = DistributedDataParallel(model)
        self.optimizer = ClockedOptimizer(
            torch.optim.AdamW(self.params, lr=1e-4),
            max_grad_norm=MAX_NORM,
            loss_scale=LossScale(init_scale=SCALE),
            model=self.ddp,
        )

    def prepare(self) -> None:
        """Gradients complete: DDP's mean over ranks, scaled."""
        self.optimizer.backward(self.ddp())

    def update(self) -> None:
        """The ranks meet; from complete gradients to updated parameters and no gradients."""
        info = self.optimizer.step()
        assert info.updated and info.clipped_norm < info.grad_norm


def race_updates(rank: int) -> Outcome:
    grads = make_gradients(make_parameters(NUM_TENSORS, NUM_ELEMENTS), seed=1 + rank)
    ours, plain = OursUnderDdp(grads), PlainUnderDdp(grads)
    for loop in (ours, plain):
        loop.prepare()
        loop.update()
    for mine, other in zip(ours.params, plain.params, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
        same = mine.detach().clone()
        dist.broadcast(same, src=0)
        assert torch.equal(mine, same)  # on every rank
    total = NUM_TENSORS * NUM_ELEMENTS
    rivals = [
        Rival("ours, model=ddp", ours.prepare, ours.update, 32 * total),
        Rival("unscale + clip + fused AdamW", plain.prepare, plain.update, 48 * total),
    ]
    size = f"{total:,} fp32 parameters in {NUM_TENSORS} tensors on each rank; bytes of memory"
    return JointRace(rivals, ROUNDS).rows(), [size, "limit at equal bandwidth: 1.50"]


def test_update_stretch_under_ddp(benchmark: Any) -> None:
    report(benchmark, race_updates)


# ---- One micro step, reduced -------------------------------------------------------------------

MODEL = f"MLP of {NUM_PARAMETERS:,} fp32 parameters, width {WIDTH}, batches of {BATCH} a rank"


def race_micro_steps(rank: int) -> Outcome:
    copied, viewed = DdpLoop(1), DdpLoop(1, bucket_view=True)
    loops: dict[str, DdpLoop | OursLoop] = {
        "ours, own reduction": OursLoop(1),
        "ours, model=ddp": OursLoop(1, ddp=True),
        "DDP": copied,
        "DDP, gradient_as_bucket_view": viewed,
    }
    expected: list[Tensor] = []
    for loop in loops.values():
        for _ in range(2):  # DDP builds its buckets anew after the first
            loop.forget()
            loop.reduce()
        found = loop.gradients()
        expected = expected or [grad.clone() for grad in found]
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-9)
    ddp, own = copied.sent(), loops["ours, own reduction"].sent()
    rivals = [
        Rival(name, loop.forget, loop.reduce, own[0] if name.endswith("reduction") else ddp[0])
        for name, loop in loops.items()
    ]
    rivals.append(Rival("without a reduction", copied.forget, copied.compute, 0))
    said = f"collectives: ours {own[1]}, and a small one where the ranks meet; DDP {ddp[1]}"
    return JointRace(rivals, ROUNDS).rows(), [MODEL, said]


def test_micro_step_with_its_reduction(benchmark: Any) -> None:
    """Forward, backward, and gradients that are reduced; no update."""
    report(benchmark, race_micro_steps)


# ---- Whole windows -----------------------------------------------------------------------------


def nothing() -> None:
    """What needs no preparation."""


def race_windows(rank: int, micro_steps: int) -> Outcome:
    loops: dict[str, DdpLoop | OursLoop] = {
        "ours, own reduction": OursLoop(micro_steps),
        "ours, own, sharded states": OursLoop(micro_steps, shard_states=True),
        "ours, model=ddp": OursLoop(micro_steps, ddp=True),
        "DDP, no_sync": DdpLoop(micro_steps),
        "DDP, no_sync, bucket view": DdpLoop(micro_steps, bucket_view=True),
    }
    if micro_steps > 1:
        loops["DDP, every micro step"] = DdpLoop(micro_steps, every=True)
    first = next(iter(loops.values()))
    for loop in loops.values():
        loop.window()
        assert way_apart(first.model, loop.model) < 1e-3
    for loop in loops.values():
        loop.window()  # DDP builds its buckets anew after its first reduction
    sent = {name: loop.sent() for name, loop in loops.items() if name != "ours, model=ddp"}
    sent["ours, model=ddp"] = sent["DDP, no_sync"]
    rivals = [Rival(name, nothing, loop.window, sent[name][0]) for name, loop in loops.items()]
    counts = "; ".join(f"{name} {count}" for name, (_, count) in sent.items())
    notes = [
        MODEL,
        f"windows of {micro_steps} micro steps, clip, AdamW; bytes handed to collectives",
        f"collectives: {counts}",
        "beside these, sharded states gather the parameters: as many bytes and collectives",
    ]
    return JointRace(rivals, ROUNDS).rows(), notes


@pytest.mark.parametrize("micro_steps", [1, 8])
def test_whole_windows(benchmark: Any, micro_steps: int) -> None:
    report(benchmark, race_windows, micro_steps)
