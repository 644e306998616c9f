"""How far reduced bf16 gradients are from their mean: DDP's, added in bf16, and ours, in fp32.

The truth is the mean of the same micro gradients in fp64. An ulp is that of bf16 at the mean of
their magnitudes: gradients cancel, and an ulp of what is left of them can be as small as you like.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from joint_loops import make_batches, make_model
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from two_ranks import print_table, run
from workloads import given_loss

from stepclock_ext import ClockedOptimizer

COLUMNS = ["gradients", "reduced by", "largest error, ulps", "mean, ulps", "error / norm"]


class Given(torch.nn.Module):
    """One bf16 parameter whose gradient is the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(16, dtype=torch.bfloat16))

    def forward(self, batch: Tensor) -> Tensor:
        return given_loss([self.weight], [batch])


def loss_of(model: torch.nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().mean()  # type: ignore[no-any-return]


def reduce_by_ddp(model: torch.nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """The mean as DDP leaves it in ``.grad``."""
    ddp = DistributedDataParallel(model)
    for number, batch in enumerate(batches):
        with nullcontext() if number + 1 == len(batches) else ddp.no_sync():
            (loss_of(ddp, batch) / len(batches)).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def reduce_by_ours(model: torch.nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """The mean as the update reads it: the sum, times a coefficient in fp64."""
    opt = ClockedOptimizer(
        torch.optim.AdamW(model.parameters()),
        gradient_accumulation_steps=len(batches),
        process_group=dist.group.WORLD,
    )
    for number, batch in enumerate(batches):
        opt.backward(loss_of(model, batch))
        if number + 1 < len(batches):
            opt.step()
    opt._end_micro_step()
    opt.clock.tick_micro(opt._window.end_micro_step())
    assert opt._processes is not None
    assert opt._processes.joint.meet(opt, asks=True).updates
    sums = [opt.accumulated(p) for p in model.parameters()]
    return [total.double() / opt._window.weight for total in sums if total is not None]


def true_means(model: torch.nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """fp64 means of every rank's micro gradients, and of their magnitudes; all elements."""
    params = list(model.parameters())
    means = [torch.zeros(sum(p.numel() for p in params), dtype=torch.float64) for _ in range(2)]
    for batch in batches:
        grads = torch.autograd.grad(loss_of(model, batch), params)
        flat = torch.cat([grad.double().flatten() for grad in grads])
        means[0] += flat
        means[1] += flat.abs()
    for mean in means:
        dist.all_reduce(mean)
        mean /= len(batches) * dist.get_world_size()
    return means


def measure(found: list[Tensor], mean: Tensor, magnitude: Tensor) -> list[str]:
    """Largest and mean error in ulps, and the error's norm beside the truth's."""
    error = torch.cat([t.double().flatten() for t in found]) - mean
    _, exponent = torch.frexp(magnitude.clamp_min(2.0**-126))
    ulps = error.abs() / torch.ldexp(torch.ones_like(error), exponent - 8)
    norm = (error.norm() / mean.norm()).item()
    return [f"{ulps.max().item():.3g}", f"{ulps.mean().item():.3g}", f"{norm:.2e}"]


def _rows(name: str, make: Any, batches: list[Tensor]) -> list[list[str]]:
    means = true_means(make(), batches)
    by = {"DDP, bf16": reduce_by_ddp, "ours, fp32": reduce_by_ours}
    return [[name, who, *measure(reduce(make(), batches), *means)] for who, reduce in by.items()]


def compare_one_number(rank: int) -> list[list[str]]:
    # Each rank has the 256 in some elements of each chunk of the ring: every order of addition.
    numbers = [256.0 if element % 4 == rank else 1.0 for element in range(16)]
    gradient = torch.tensor(numbers, dtype=torch.bfloat16)
    return _rows("256, 1, 1, 1 on 4 ranks", Given, [gradient])


def compare_models(rank: int, micro_steps: int) -> list[list[str]]:
    batches = [batch.bfloat16() for batch in make_batches(micro_steps)]
    name = f"MLP, 2 ranks, {micro_steps} micro step{'s' * (micro_steps > 1)}"
    return _rows(name, lambda: make_model(torch.bfloat16), batches)


def test_errors_of_reduced_bf16_gradients(capsys: Any) -> None:
    rows = run(compare_one_number, num_ranks=4)[0]
    for micro_steps in (1, 8):
        rows += run(compare_models, micro_steps)[0]
    notes = ["MLP: that of joint_loops.py in bf16, gradients from its own backward"]
    print_table(capsys, "bf16 gradients, reduced", COLUMNS, rows, notes)
