"""The run by ClockedOptimizer: the loop that a user would write."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from stepclock_ext import ClockedOptimizer, LossScale, StepInfo

from .data import Batch
from .model import ByteGPT
from .recipe import Recipe
from .world import ALONE, World

__all__ = ["ClockedRun"]


class ClockedRun:
    """Trains `model` in place, a window at a time.

    Args:
        model: the model.
        recipe: how to train.
        backend: who runs the kernels.
        world: the processes that train together.

    Attributes:
        model: the model.
        opt: its optimizer, with the clock.
        update_ms: of the last window, from the last gradient to cleared gradients; with several
            processes from the last backward, which reduces gradients as it goes.
    """

    def __init__(
        self, model: ByteGPT, recipe: Recipe, *, backend: str, world: World = ALONE
    ) -> None:
        self.model = model
        self.world = world
        adamw = torch.optim.AdamW(
            model.parameters(),
            lr=recipe.learning_rate,
            betas=recipe.betas,
            weight_decay=recipe.weight_decay,
        )
        self.opt = ClockedOptimizer(
            adamw,
            gradient_accumulation_steps=recipe.accumulation_steps // world.size,
            max_grad_norm=recipe.max_grad_norm,
            loss_scale=LossScale(recipe.init_scale, growth_interval=recipe.growth_interval),
            schedulers=[LambdaLR(adamw, recipe.lr_factor)],
            model=model,
            max_consecutive_skips=10,
            backend=backend,
            process_group=dist.group.WORLD if world.size > 1 else None,
        )
        self.update_ms = 0.0

    def window(self, batches: Sequence[Batch]) -> StepInfo:
        """Runs this process's micro steps of one window; the last one updates.

        Raises:
            NonFiniteGradientError: the tenth skip in a row.
        """
        for inputs, targets in batches:
            loss = self.model.loss(inputs, targets)
            start = time.perf_counter()
            self.opt.backward(loss, weight=targets.numel())
            if self.world.size == 1:
                start = time.perf_counter()
            info = self.opt.step()
        self.update_ms = (time.perf_counter() - start) * 1e3
        return info
