"""What one window of accumulation has taken in so far, beside the gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Window"]


@dataclass
class Window:
    """The weights and losses between two updates.

    Attributes:
        scale: what the losses of this window are seeded with; 1 without a loss scale. It holds from
            the first micro step to the last.
        unit: what weights are counted in while they are seeds: a power of two near the first one,
            which changes no bit. Only with a loss scale: scale * tokens would leave the range of
            fp16, which the scale was chosen for. 1 without.
        weight: of all micro steps so far.
        loss_sum: fp64 scalar, sum of weight * loss; None where a loss is not known.
        loss_known: no plain ``loss.backward()`` was among the micro steps.
        seeded: ``opt.backward`` put a gradient into this window.
        is_scaled: there is a loss scale.
        is_updating: parameters have begun to move.
        micro_weight: of the micro step that ``step()`` has not closed yet.
        is_pending: that micro step has called ``opt.backward``.
        broken: why the window cannot be finished; ``discard()`` clears it.
    """

    scale: float = 1.0
    unit: float = 1.0
    weight: float = 0.0
    loss_sum: Tensor | None = None
    loss_known: bool = True
    seeded: bool = False
    is_scaled: bool = False
    is_updating: bool = False
    micro_weight: float = 0.0
    is_pending: bool = False
    broken: str | None = None

    def set_unit(self, first_weight: float) -> None:
        """Counts seeds in units of about `first_weight`."""
        self.unit = 2.0 ** math.floor(math.log2(first_weight))

    def seed(self, loss: Tensor, weight: float) -> Tensor | None:
        """What autograd starts from, ``scale * weight / unit``; None for 1.

        Infinite where the loss's dtype cannot hold it: the window is skipped then, and a dynamic
        scale backs off.
        """
        value = self.scale * weight / self.unit
        if value == 1.0:
            return None
        return torch.full_like(loss, value, dtype=torch.float64).to(loss.dtype)

    def add_loss(self, loss: Tensor | float, weight: float) -> None:
        """Adds ``weight * loss``; on the loss's device, without waiting for it."""
        value = torch.as_tensor(loss).detach().double().reshape(()) * weight
        self.loss_sum = value if self.loss_sum is None else self.loss_sum + value

    def add_weight(self, weight: float) -> None:
        """Counts `weight` for the window and for its current micro step."""
        self.weight += weight
        self.micro_weight += weight

    def start_update(self) -> None:
        """From here on a failure leaves parameters that may have moved."""
        self.is_updating = True

    def end_micro_step(self) -> float:
        """Closes the current micro step; returns its weight."""
        weight, self.micro_weight, self.is_pending = self.micro_weight, 0.0, False
        return weight

    def divisor(self, reduction: str) -> float:
        """What the window's sum is divided by before the clip: scale * total weight / unit."""
        return self.scale * (self.weight if reduction == "mean" else 1.0) / self.unit

    def loss(self, reduction: str) -> float | None:
        """The loss that the window's gradient belongs to."""
        if not self.loss_known or self.loss_sum is None:
            return None
        total = self.loss_sum.item()
        return total / self.weight if reduction == "mean" else total

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint inside the window needs, as plain Python values."""
        loss_sum = None if self.loss_sum is None else self.loss_sum.item()
        return {**vars(self), "loss_sum": loss_sum}

    @staticmethod
    def from_state_dict(state: dict[str, Any]) -> Window:
        """The window that `state_dict` described.

        Raises:
            ValueError: `state` has other entries.
        """
        if state.keys() != vars(Window()).keys():
            raise ValueError(
                f"Window: the state must have {sorted(vars(Window()))}, got {sorted(state)}"
            )
        numbers = [state[name] for name in ("scale", "unit", "weight", "micro_weight")]
        if not all(isinstance(number, (int, float)) for number in numbers):
            raise ValueError(f"Window: scale, unit and weights must be numbers, got {numbers}")
        loss_sum = state["loss_sum"]
        tensor = (
            None if loss_sum is None else torch.tensor(loss_sum, dtype=torch.float64, device="cpu")
        )
        return Window(**{**state, "loss_sum": tensor})
