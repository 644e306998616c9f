"""The same run by plain PyTorch: accumulation, loss scale, clip and schedule by hand."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from .data import Batch
from .model import ByteGPT
from .recipe import Recipe

__all__ = ["PlainRun"]


class PlainRun:
    """Trains `model` in place, a window at a time, by the fastest calls that torch has.

    Attributes:
        model: the model.
        update_ms: of the last window, from the last gradient to cleared gradients.
    """

    def __init__(self, model: ByteGPT, recipe: Recipe) -> None:
        self.model = model
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
        """Runs the micro steps of one window and its update; returns the mean loss."""
        total = torch.zeros((), dtype=torch.float64)
        for inputs, targets in batches:
            loss = self.model.loss(inputs, targets)
            self.scaler.scale(loss / len(batches)).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        start = time.perf_counter()
        self._update()
        self.update_ms = (time.perf_counter() - start) * 1e3
        return total.item() / len(batches)

    def _update(self) -> None:
        self.scaler.unscale_(self.optimizer)
        clip_grad_norm_(self.model.parameters(), self.max_grad_norm, foreach=True)
        self.scaler.step(self.optimizer)
        scale = self.scaler.get_scale()
        self.scaler.update()
        if self.scaler.get_scale() >= scale:  # a smaller scale: the update was skipped
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
