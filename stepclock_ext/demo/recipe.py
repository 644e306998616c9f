"""How both runs train: the numbers that they share."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Recipe"]


@dataclass(frozen=True)
class Recipe:
    """Numbers of a training run, and its learning rate as a function of the update.

    Gentle enough that rounding hardly grows: at a rate of 2e-3 and betas[1] = 0.95, losses 1e-7
    apart were 1e-2 apart after 100 updates, and ended higher; with these they stay within 1e-4.

    Attributes:
        updates: the horizon of the schedule.
        accumulation_steps: micro steps in a window.
        sequences: of text in a micro batch.
        learning_rate: the peak.
        landing: the last rate, as a share of the peak.
        growth_interval: updates until the loss scale doubles; short, so that the demo shows it.
    """

    updates: int = 80
    accumulation_steps: int = 8
    sequences: int = 4
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    landing: float = 0.1
    init_scale: float = 65536.0
    growth_interval: int = 25

    @property
    def warmup_updates(self) -> int:
        """A tenth of the run, three updates at least; the last of them uses the peak."""
        return max(3, math.ceil(self.updates / 10))

    def lr_factor(self, updates_done: int) -> float:
        """Share of the peak that the update after `updates_done` updates uses, for ``LambdaLR``.

        >>> factor = Recipe(updates=40).lr_factor
        >>> factor(0), factor(3), round(factor(39), 12)
        (0.25, 1.0, 0.1)
        """
        update, warmup = updates_done + 1, self.warmup_updates
        if update <= warmup:
            return update / warmup
        progress = min(1.0, (update - warmup) / max(1, self.updates - warmup))
        return self.landing + (1 - self.landing) * 0.5 * (1 + math.cos(math.pi * progress))
