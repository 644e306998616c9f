"""The global norm of a window, and the coefficient that turns its sum into the gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from . import ops
from .accumulator import Accumulator
from .window_gradients import WindowGradients

__all__ = ["Measurement", "measure", "measure_on_device_", "nonfinite_rows"]


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
    accumulator: Accumulator,
    gradients: WindowGradients,
    *,
    divisor: float,
    max_norm: float | None,
    norm_type: float,
) -> Measurement:
    """Norm, finiteness and coefficient of a window, by one read of what did not ride along.

    Args:
        accumulator: holds the slots.
        gradients: of the window.
        divisor: loss scale times total weight (only the scale with ``reduction="sum"``).
        max_norm: None for no clip.
        norm_type: 2, infinity, or another positive p (slower, through the reference).
    """
    maxima = math.isinf(norm_type)
    stats = torch.empty(3, dtype=torch.float64, device=accumulator.rows.backend.device)
    if maxima or norm_type == 2.0:
        measure_on_device_(
            stats, accumulator, gradients, divisor=divisor, max_norm=max_norm, maxima=maxima
        )
        norm, coefficient, clip = stats.tolist()
        if maxima or _TINY < norm * divisor < math.inf or not _has_fp64(gradients):
            return Measurement(stats, norm, coefficient, norm * clip, math.isfinite(norm))
    norm = _scaled_norm(gradients, norm_type) / divisor
    clip = ops.clip_factor(norm, math.inf if max_norm is None else max_norm)
    stats.copy_(stats.new_tensor([norm, clip / divisor, clip]))
    return Measurement(stats, norm, clip / divisor, norm * clip, math.isfinite(norm))


def measure_on_device_(
    stats: Tensor,
    accumulator: Accumulator,
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


def _fill_slots(accumulator: Accumulator, gradients: WindowGradients, *, maxima: bool) -> None:
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


def _scaled_norm(gradients: WindowGradients, norm_type: float) -> float:
    """``max * (sum |x / max| ** p) ** (1 / p)``: no power leaves the range (as LAPACK's nrm2)."""
    present = [grad for grad in gradients.grads if grad is not None and grad.numel()]
    largest = 0.0
    for grad in present:
        peak = _magnitudes(grad).max().item()
        largest = peak if peak > largest or math.isnan(peak) else largest
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    powers = (_magnitudes(grad).div_(largest).pow_(norm_type).sum().item() for grad in present)
    return float(largest * sum(powers) ** (1.0 / norm_type))
