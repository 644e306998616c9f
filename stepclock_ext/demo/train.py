"""The run by ClockedOptimizer: the loop that a user would write."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch.optim.lr_scheduler import LambdaLR

from stepclock_ext import ClockedOptimizer, LossScale, StepInfo

from .data import Batch
from .model import ByteGPT
from .recipe import Recipe

__all__ = ["ClockedRun"]


class ClockedRun:
    """Trains `model` in place, a window at a time.

    Attributes:
        model: the model.
        opt: its optimizer, with the clock.
        update_ms: of the last window, from the last gradient to cleared gradients.
    """

    def __init__(self, model: ByteGPT, recipe: Recipe, *, backend: str) -> None:
        self.model = model
        adamw = torch.optim.AdamW(
            model.parameters(),
            lr=recipe.learning_rate,
            betas=recipe.betas,
            weight_decay=recipe.weight_decay,
        )
        self.opt = ClockedOptimizer(
            adamw,
            gradient_accumulation_steps=recipe.accumulation_steps,
            max_grad_norm=recipe.max_grad_norm,
            loss_scale=LossScale(recipe.init_scale, growth_interval=recipe.growth_interval),
            schedulers=[LambdaLR(adamw, recipe.lr_factor)],
            model=model,
            max_consecutive_skips=10,
            backend=backend,
        )
        self.update_ms = 0.0

    def window(self, batches: Sequence[Batch]) -> StepInfo:
        """Runs the micro steps of one window; the last one updates.

        Raises:
            NonFiniteGradientError: the tenth skip in a row.
        """
        for inputs, targets in batches:
            self.opt.backward(self.model.loss(inputs, targets), weight=targets.numel())
            start = time.perf_counter()
            info = self.opt.step()
        self.update_ms = (time.perf_counter() - start) * 1e3
        return info
