"""One training step in two processes: plain DDP, ours driving DDP, ours with its own reduction."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from two_ranks import SHRINK

from stepclock_ext import ClockedOptimizer, ReducerOptions

__all__ = ["BATCH", "NUM_PARAMETERS", "WIDTH", "DdpLoop", "OursLoop", "make_model", "way_apart"]

WIDTH = 2048 // SHRINK
NUM_LAYERS = 6
BATCH = 16
NUM_PARAMETERS = NUM_LAYERS * WIDTH * (WIDTH + 1)
MAX_NORM = 1e-3  # the clip binds


def make_model(dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    """Layers of one width, the same on every rank; reductions weigh as the batch is small."""
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(NUM_LAYERS):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers).to(dtype)


def make_batches(num_batches: int) -> list[Tensor]:
    """Another sequence of batches on each rank."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    return [torch.randn(BATCH, WIDTH, generator=generator) for _ in range(num_batches)]


def loss_of(model: torch.nn.Module, batch: Tensor) -> Tensor:
    """The mean of squares of what comes out."""
    return model(batch).square().mean()  # type: ignore[no-any-return]


class DdpLoop:
    """Plain PyTorch: DDP, ``clip_grad_norm_``, fused AdamW.

    Args:
        micro_steps: of a window.
        every: each micro step is reduced; else all but the last run inside ``no_sync``.
        bucket_view: DDP's ``gradient_as_bucket_view``.
    """

    def __init__(self, micro_steps: int, *, every: bool = False, bucket_view: bool = False) -> None:
        self.model = make_model()
        self.ddp = DistributedDataParallel(self.model, gradient_as_bucket_view=bucket_view)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batches = make_batches(micro_steps)
        self.every = every

    def reduce(self) -> None:
        """From a batch to gradients that are reduced."""
        self._backward(0, is_reduced=True)

    def compute(self) -> None:
        """The same without a reduction."""
        self._backward(0, is_reduced=False)

    def forget(self) -> None:
        """No gradients."""
        self.optimizer.zero_grad()

    def window(self) -> None:
        """Every micro step of a window, and the update."""
        for number in range(len(self.batches)):
            is_last = number + 1 == len(self.batches)
            self._backward(number, is_reduced=is_last or self.every)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self) -> list[Tensor]:
        """The mean over ranks, after `reduce`."""
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def sent(self) -> tuple[int, int]:
        """Bytes and collectives of a window, told by another DDP's hook: it would slow this one."""
        other = DdpLoop(len(self.batches), every=self.every)
        sizes: list[int] = []

        def count(_, bucket):  # type: ignore[no-untyped-def]  # DDP wants annotations as classes
            sizes.append(bucket.buffer().nbytes)
            return allreduce_hook(dist.group.WORLD, bucket)

        other.ddp.register_comm_hook(None, count)
        other.window()  # DDP builds its buckets anew after its first reduction
        sizes.clear()
        other.window()
        return sum(sizes), len(sizes)

    def _backward(self, number: int, *, is_reduced: bool) -> None:
        with nullcontext() if is_reduced else self.ddp.no_sync():
            (loss_of(self.ddp, self.batches[number]) / len(self.batches)).backward()


class OursLoop:
    """ClockedOptimizer.

    Args:
        micro_steps: of a window.
        ddp: drives DDP; else it reduces by itself.
        reducer: options of its own reduction.
    """

    def __init__(self, micro_steps: int, *, ddp: bool = False, **reducer: Any) -> None:
        self.model = make_model()
        self.called = DistributedDataParallel(self.model) if ddp else self.model
        self.optimizer = ClockedOptimizer(
            torch.optim.AdamW(self.model.parameters(), lr=1e-4),
            gradient_accumulation_steps=micro_steps,
            max_grad_norm=MAX_NORM,
            model=self.called if ddp else None,
            process_group=None if ddp else ReducerOptions(**reducer),
        )
        self.batches = make_batches(micro_steps)

    def reduce(self) -> None:
        """From a batch to sums that are reduced: what `step` does before it updates."""
        opt = self.optimizer
        opt.backward(loss_of(self.called, self.batches[0]))
        opt._end_micro_step()
        opt.clock.tick_micro(opt._window.end_micro_step())
        assert opt._processes is not None
        assert opt._processes.joint.meet(opt, asks=True).updates

    def forget(self) -> None:
        """No window."""
        self.optimizer.discard()

    def window(self) -> None:
        """Every micro step of a window, and the update."""
        for batch in self.batches:
            self.optimizer.backward(loss_of(self.called, batch))
            info = self.optimizer.step()
        assert info.updated

    def gradients(self) -> list[Tensor]:
        """The mean over ranks, after `reduce`."""
        sums = [self.optimizer.accumulated(p) for p in self.model.parameters()]
        count = dist.get_world_size() if self.called is self.model else 1  # DDP has divided
        return [total / count for total in sums if total is not None]

    def counted(self) -> tuple[int, int]:
        """Bytes and collectives of its own reduction so far; gathers of parameters are apart."""
        reduction = self.optimizer._pass.accumulator.reduction
        assert reduction is not None
        return reduction.num_bytes, reduction.num_collectives

    def sent(self) -> tuple[int, int]:
        """Bytes and collectives of a window: of the one that is run here."""
        before = self.counted()
        self.window()
        num_bytes, num_collectives = self.counted()
        return num_bytes - before[0], num_collectives - before[1]


def way_apart(one: torch.nn.Module, other: torch.nn.Module) -> float:
    """The distance of two models, in units of the way that one has come from its start."""
    pairs = zip(one.parameters(), other.parameters(), make_model().parameters(), strict=True)
    apart = way = 0.0
    for mine, theirs, start in pairs:
        apart += (mine - theirs).double().square().sum().item()
        way += (mine - start).double().square().sum().item()
    return float((apart / way) ** 0.5)
