"""The gradient noise scale: whether more accumulation pays."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import ops
from .caught_gradients import CaughtGradients
from .parameters import ParameterRows

__all__ = ["MicroNorms", "NoiseSample", "NoiseScale"]

# One window says little: two noisy numbers are divided. This remembers some 20 updates.
_DECAY = 0.95


@dataclass(frozen=True)
class NoiseSample:
    """What one window says.

    Attributes:
        weighted_squares: sum of w_i * |g_i|**2 over its micro steps.
        num_micro: their number.
        weight: sum of w_i.
        norm: of the mean gradient.
    """

    weighted_squares: float
    num_micro: int
    weight: float
    norm: float


@dataclass
class NoiseScale:
    """The simple noise scale ``tr(Sigma) / |G|**2`` of McCandlish et al. 2018, equation 2.9.

    A window of n micro steps with gradients g_i of weights w_i, W in all, and their mean g gives
    unbiased estimates of both (appendix A.1, here for any weights)::

        trace  = W / (n - 1) * (sum(w_i * |g_i|**2) / W - |g|**2)
        square = |g|**2 - trace / W

    Each is averaged over updates before they are divided. The unit is that of the weights: micro
    batches, unless ``weight=`` says samples or tokens. Up to about this many in an update the
    learning rate may grow linearly with them; beyond, more accumulation buys little.

    Attributes:
        trace: averaged; None before the first window.
        square: averaged.

    Example:
        >>> noise = NoiseScale()  # two micro batches of weight 1: 3 and 1, mean 2
        >>> noise.observe(NoiseSample(weighted_squares=10.0, num_micro=2, weight=2.0, norm=2.0))
        0.6666666666666666
    """

    trace: float | None = None
    square: float = 0.0

    def observe(self, sample: NoiseSample) -> float | None:
        """Takes in a window, and returns the noise scale after it; None where it says nothing."""
        if sample.num_micro < 2:
            return None
        weight, mean_square = sample.weight, sample.norm**2
        spread = sample.weighted_squares / weight - mean_square
        trace = weight / (sample.num_micro - 1) * spread
        square = mean_square - trace / weight
        if self.trace is None:
            self.trace, self.square = trace, square
        else:
            self.trace += (1 - _DECAY) * (trace - self.trace)
            self.square += (1 - _DECAY) * (square - self.square)
        return self.trace / self.square if self.square > 0 else math.inf


class MicroNorms:
    """The squared norm of each micro gradient of a window, from passes that read it anyway.

    A first gradient that becomes the sum itself is read when the second is added to it.

    Args:
        rows: the parameters.
        caught: adds their gradients.
    """

    def __init__(self, rows: ParameterRows, caught: CaughtGradients) -> None:
        self._rows = rows
        self._caught = caught
        size, device = rows.num_slots, rows.backend.device
        self._grad_slots = caught.sums.grad_slots = ops.make_slots(size, device)
        self._prior_slots = caught.sums.prior_slots = ops.make_slots(size, device)
        self._inverse_weights = ops.make_slots(size, device)
        self.clear()

    def clear(self) -> None:
        """A new window."""
        self._total = 0.0
        self._num_micro = 0
        self._is_known = True
        for slots in (self._grad_slots, self._prior_slots, self._inverse_weights):
            slots.zero_()

    def end_micro_step(self, weight: float) -> None:
        """Closes a micro step whose gradients are all in."""
        arrived = self._caught.end_micro_step()
        if weight <= 0:
            self._is_known &= not arrived
            return
        self._num_micro += 1  # without a gradient as well: it is zero then
        if not arrived:
            return
        self._total += self._grad_slots.sum().item() / weight
        self._grad_slots.zero_()
        kept = [row for row in arrived if self._is_kept(row)]
        if len(kept) == len(self._rows.params):
            self._inverse_weights.fill_(1 / weight)
            return
        for row in kept:
            self._inverse_weights[self._rows.slots_of(row)] = 1 / weight

    def finish(
        self,
        grads: list[Tensor | None],
        slots: Tensor,
        *,
        scale: float,
        weight: float,
        norm: float,
    ) -> NoiseSample | None:
        """The window's sample; None where the norm of a micro gradient is not known.

        A row got two gradients in one micro step, or some that went past us.

        Args:
            grads: the window's sums, as they were measured.
            slots: their chunk sums; those of a row that came once are its only gradient's.
            scale: a micro sum is ``scale * weight * gradient``.
            weight: of the window.
            norm: of its sum.
        """
        found = self._read(grads, slots)
        if found is None:
            return None
        return NoiseSample(found[0] / scale**2, found[1], weight, norm / (scale * weight))

    def _read(
        self, grads: list[Tensor | None], slots: Tensor | None = None
    ) -> tuple[float, int] | None:
        """Sum of ``|s_i|**2 / w_i`` over the micro sums s_i, and their number."""
        if not self._is_known or self._caught.sums.repeated:
            return None
        for row, grad in enumerate(grads):
            if grad is not None and grad is not self._caught.sum(row):
                return None
            if grad is None or not self._is_kept(row):
                continue
            if not self._rows.fits(row):
                return None  # p.data was replaced: its chunk sums are not where they were
            if slots is None:  # inside the window, nothing has read it yet
                ops.sum_squares_(self._prior_slots, [grad], self._rows.layout((row,)))
            else:
                its = self._rows.slots_of(row)
                self._prior_slots[its] = slots[its]
        priors = torch.dot(self._prior_slots, self._inverse_weights).item()
        return self._total + priors, self._num_micro

    def state_dict(self, grads: list[Tensor | None]) -> dict[str, Any] | None:
        """An open window's norms; None where they are not known."""
        found = self._read(grads)
        return None if found is None else {"total": found[0], "num_micro": found[1]}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Goes on in the window that `state_dict` described."""
        self.clear()
        self._is_known = state is not None
        if state is not None:
            self._total, self._num_micro = float(state["total"]), int(state["num_micro"])

    def _is_kept(self, row: int) -> bool:
        """Whether the row's sum is its first gradient, which nothing has read."""
        return self._caught.sums.is_kept(row) and self._caught.sums.count(row) == 1
