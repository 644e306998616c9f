"""The same run by plain PyTorch: accumulation, loss scale, clip and schedule by hand."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from .data import Batch
from .model import ByteGPT, mean_loss
from .recipe import Recipe
from .world import ALONE, World

__all__ = ["PlainRun"]


class PlainRun:
    """Trains `model` in place, a window at a time, by the fastest calls that torch has.

    Args:
        model: the model.
        recipe: how to train.
        world: the processes that train together, by DistributedDataParallel.

    Attributes:
        model: the model.
        update_ms: of the last window, from the last gradient to cleared gradients; with several
            processes from the last backward, which reduces gradients as it goes.
    """

    def __init__(self, model: ByteGPT, recipe: Recipe, *, world: World = ALONE) -> None:
        self.model = model
        self.world = world
        self.forward: Any = model
        if world.size > 1:
            self.forward = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.max_grad_norm = recipe.max_grad_norm
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=recipe.learning_rate,
            betas=recipe.betas,
            weight_decay=recipe.weight_decay,
            fused=True,
        )
        self.scheduler = LambdaLR(self.optimizer, recipe.lr_factor)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=recipe.init_scale, growth_interval=recipe.growth_interval
        )
        self.update_ms = 0.0

    def window(self, batches: Sequence[Batch]) -> float:
        """Runs this process's micro steps of one window and its update; returns the mean loss."""
        total = torch.zeros((), dtype=torch.float64)
        for number, (inputs, targets) in enumerate(batches, 1):
            with nullcontext() if number == len(batches) else self._unreduced():
                loss = mean_loss(self.forward(inputs), targets)
                scaled = self.scaler.scale(loss / len(batches))
                start = time.perf_counter()
                scaled.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        if self.world.size == 1:
            start = time.perf_counter()
        self._update()
        self.update_ms = (time.perf_counter() - start) * 1e3
        self.world.add_up_(total)
        return total.item() / (len(batches) * self.world.size)

    def _unreduced(self) -> Any:
        """Around micro steps whose gradients stay here for now."""
        return self.forward.no_sync() if self.world.size > 1 else nullcontext()

    def _update(self) -> None:
        self.scaler.unscale_(self.optimizer)
        clip_grad_norm_(self.model.parameters(), self.max_grad_norm, foreach=True)
        self.scaler.step(self.optimizer)
        scale = self.scaler.get_scale()
        self.scaler.update()
        if self.scaler.get_scale() >= scale:  # a smaller scale: the update was skipped
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
