"""The global norm of a window, and the coefficient that turns its sum into the gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from . import ops
from .parameters import ParameterRows
from .ranks import Ranks
from .window_gradients import WindowGradients

__all__ = [
    "Across",
    "Measurement",
    "ShareSlots",
    "Sums",
    "measure",
    "measure_on_device_",
    "nonfinite_rows",
]


class Sums(Protocol):
    """Chunk sums of a window, some of which are there already: the accumulator's."""

    @property
    def rows(self) -> ParameterRows: ...

    @property
    def slots(self) -> Tensor: ...

    def unmeasured(self, gradients: WindowGradients) -> tuple[int, ...]:
        """Walked rows whose slots have to be written."""
        ...


@dataclass(frozen=True, eq=False)
class ShareSlots:
    """Chunk sums of slices, none of which is known before it is asked for.

    Attributes:
        rows: the slices.
        slots: fp64.
    """

    rows: ParameterRows
    slots: Tensor

    def unmeasured(self, gradients: WindowGradients) -> tuple[int, ...]:
        return gradients.walked


@dataclass(frozen=True, eq=False)
class Across:
    """A norm that is taken across ranks, each of which holds a part.

    Attributes:
        ranks: who they are.
        counted: whether this rank accounts for what it holds of each row; of equal copies one does.
        what: where we are, for messages.
    """

    ranks: Ranks
    counted: Sequence[bool]
    what: str

    def sum(self, number: float) -> float:
        """Over ranks, in their order."""
        return sum(told[0] for told in self.ranks.gather([number], self.what))

    def max(self, number: float) -> float:
        """Over ranks; NaN where one is."""
        numbers = [told[0] for told in self.ranks.gather([number], self.what)]
        return math.nan if any(map(math.isnan, numbers)) else max(numbers)


@dataclass(frozen=True, eq=False)
class Measurement:
    """What a window's gradients came to.

    Attributes:
        stats: fp64, shape (3,): norm, coefficient, clip factor; what the update kernels read.
        norm: of the mean gradient, unscaled, before the clip.
        coefficient: clip / (loss scale * total weight).
        clipped_norm: norm * clip.
        finite: every gradient was finite.
    """

    stats: Tensor
    norm: float
    coefficient: float
    clipped_norm: float
    finite: bool


def measure(
    accumulator: Sums,
    gradients: WindowGradients,
    *,
    divisor: float,
    max_norm: float | None,
    norm_type: float,
    across: Across | None = None,
) -> Measurement:
    """Norm, finiteness and coefficient of a window, by one read of what did not ride along.

    Args:
        accumulator: holds the slots.
        gradients: of the window.
        divisor: loss scale times total weight (only the scale with ``reduction="sum"``).
        max_norm: None for no clip.
        norm_type: 2, infinity, or another positive p (slower, through the reference).
        across: the ranks that hold the rest; None where everything is here.
    """
    maxima = math.isinf(norm_type)
    stats = torch.empty(3, dtype=torch.float64, device=accumulator.rows.backend.device)
    if across is not None:
        total = _total_across(across, accumulator, gradients, norm_type)
        return _decide(stats, total / divisor, divisor=divisor, max_norm=max_norm)
    if maxima or norm_type == 2.0:
        measure_on_device_(
            stats, accumulator, gradients, divisor=divisor, max_norm=max_norm, maxima=maxima
        )
        norm, coefficient, clip = stats.tolist()
        if maxima or _TINY < norm * divisor < math.inf or not _has_fp64(gradients):
            return Measurement(stats, norm, coefficient, norm * clip, math.isfinite(norm))
    norm = _scaled_norm(gradients.grads, norm_type) / divisor
    return _decide(stats, norm, divisor=divisor, max_norm=max_norm)


def _decide(stats: Tensor, norm: float, *, divisor: float, max_norm: float | None) -> Measurement:
    """A norm that is known on the host, and what follows from it."""
    clip = ops.clip_factor(norm, math.inf if max_norm is None else max_norm)
    stats.copy_(stats.new_tensor([norm, clip / divisor, clip]))
    return Measurement(stats, norm, clip / divisor, norm * clip, math.isfinite(norm))


def _total_across(
    across: Across, sums: Sums, gradients: WindowGradients, norm_type: float
) -> float:
    """The norm of all ranks' sums; the same on each of them, to the bit."""
    maxima = math.isinf(norm_type)
    if maxima or norm_type == 2.0:
        _fill_slots(sums, gradients, maxima=maxima)
        mine = _counted_slots(across, sums, gradients)
        if maxima:
            return across.max(mine.max().item() if mine.numel() else 0.0)
        norm = math.sqrt(across.sum(mine.sum().item()))
        if _TINY < norm < math.inf or not across.max(float(_has_fp64(gradients))):
            return norm
    counted = [
        grad if is_counted or grad is None or not _all_finite(grad) else None
        for grad, is_counted in zip(gradients.grads, across.counted, strict=True)
    ]
    return _scaled_norm(counted, norm_type, across)


def _counted_slots(across: Across, sums: Sums, gradients: WindowGradients) -> Tensor:
    """The slots, zero where another rank accounts for them; a NaN or infinity counts everywhere."""
    rows, factors = sums.rows, torch.ones_like(sums.slots)
    for row, is_counted in enumerate(across.counted):
        if not is_counted:
            factors[rows.slots_of(row)] = 0.0
            factors[rows.odd_slot(row)] = 0.0
    return sums.slots * factors


def measure_on_device_(
    stats: Tensor,
    accumulator: Sums,
    gradients: WindowGradients,
    *,
    divisor: float,
    max_norm: float | None,
    maxima: bool,
) -> None:
    """Writes norm, coefficient and clip factor into `stats`, which nobody has to wait for.

    Arguments as for `measure`; `maxima` is ``norm_type == inf``, without it the norm is the 2-norm.
    """
    limit = math.inf if max_norm is None else max_norm
    _fill_slots(accumulator, gradients, maxima=maxima)
    layout, slots = accumulator.rows.layout(gradients.walked), accumulator.slots
    ops.coefficient_(stats, slots, layout, divisor=divisor, max_norm=limit, maxima=maxima)


def nonfinite_rows(gradients: WindowGradients) -> list[int]:
    """Rows whose gradient holds a NaN or an infinity. For messages: a pass of its own."""
    return [
        row
        for row, grad in enumerate(gradients.grads)
        if grad is not None and not _all_finite(grad)
    ]


# Below this norm, squares of fp64 values have lost digits to underflow (2^-511 squared is 2^-1022).
_TINY = 1e-140


def _fill_slots(accumulator: Sums, gradients: WindowGradients, *, maxima: bool) -> None:
    rows, slots = accumulator.rows, accumulator.slots
    pending = gradients.walked if maxima else accumulator.unmeasured(gradients)
    by_magnitude = [row for row in pending if maxima and rows.dtypes[row].is_complex]
    if by_magnitude:  # the kernels see a complex number as two real ones
        pending = tuple(row for row in pending if not rows.dtypes[row].is_complex)
    if pending:
        layout, grads = rows.layout(pending), gradients.of(pending)
        layout.verified["ACCUMULATOR"] = grads  # collect() made them fit
        (ops.max_abs_ if maxima else ops.sum_squares_)(slots, grads, layout)
    for row in (*gradients.odd, *by_magnitude):
        magnitudes = _magnitudes(gradients.grads[row])
        if magnitudes.numel():
            value = magnitudes.max() if maxima else magnitudes.square().sum()
            slots[rows.odd_slot(row)] = value.to(slots.device)


def _magnitudes(grad: Tensor | None) -> Tensor:
    """fp64 magnitudes of a gradient's stored values."""
    assert grad is not None
    values = (grad.coalesce().values() if grad.is_sparse else grad).detach()
    return values.to(torch.complex128 if values.is_complex() else torch.float64).abs()


def _has_fp64(gradients: WindowGradients) -> bool:
    wide = (torch.float64, torch.complex128)
    return any(grad is not None and grad.dtype in wide for grad in gradients.grads)


def _all_finite(grad: Tensor) -> bool:
    return bool((grad.coalesce().values() if grad.is_sparse else grad).isfinite().all())


def _scaled_norm(
    grads: Sequence[Tensor | None], norm_type: float, across: Across | None = None
) -> float:
    """``max * (sum |x / max| ** p) ** (1 / p)``: no power leaves the range (as LAPACK's nrm2)."""
    present = [grad for grad in grads if grad is not None and grad.numel()]
    largest = 0.0
    for grad in present:
        peak = _magnitudes(grad).max().item()
        largest = peak if peak > largest or math.isnan(peak) else largest
    if across is not None:
        largest = across.max(largest)
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    powers = (_magnitudes(grad).div_(largest).pow_(norm_type).sum().item() for grad in present)
    total = sum(powers) if across is None else across.sum(sum(powers))
    return float(largest * total ** (1.0 / norm_type))
