"""The fused updates on rows of a test, with the numbers of the test on the rows' device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from fused import ADAM, COEFFICIENT, PLAIN_ADAM, PLAIN_SGD, Rows
from torch import Tensor

from stepclock_ext import ops

__all__ = ["MOMENTUM", "adam_", "average_", "sgd_"]

MOMENTUM = {**PLAIN_SGD, "momentum": 0.9, "weight_decay": 0.3, "nesterov": True}


def adam_(
    rows: Rows, flags: dict[str, Any] = PLAIN_ADAM, *, norm: float = 1.0, **along: Any
) -> None:
    """One update of Adam."""
    maxima = rows.moments[2] if flags["amsgrad"] else None
    states = ops.AdamStates(rows.steps, rows.moments[0], rows.moments[1], maxima)
    numbers: dict[str, Any] = ADAM | flags
    scalars = ops.AdamScalars(**numbers)
    stats, companions = _stats(rows, norm, COEFFICIENT), _companions(rows, **along)
    ops.adam_(rows.params, states, rows.sums, stats, rows.layout, scalars, companions)


def sgd_(
    rows: Rows,
    flags: dict[str, Any] = MOMENTUM,
    *,
    first: bool = False,
    coefficient: float = COEFFICIENT,
    norm: float = 1.0,
    **along: Any,
) -> None:
    """One update of SGD."""
    buffers = rows.buffers if flags["momentum"] else None
    scalars = ops.SgdScalars(first=first, **flags)
    stats, companions = _stats(rows, norm, coefficient), _companions(rows, **along)
    ops.sgd_(rows.params, buffers, rows.sums, stats, rows.layout, scalars, companions)


def average_(rows: Rows, *, norm: float = 1.0, **along: Any) -> None:
    """Moves the averages and nothing else."""
    stats, companions = _stats(rows, norm, 1.0), _companions(rows, **along)
    ops.move_average_(rows.params, stats, rows.layout, companions)


def _stats(rows: Rows, norm: float, coefficient: float) -> Tensor:
    device = rows.layout.backend.device
    return torch.tensor([norm, coefficient, 1.0], dtype=torch.float64, device=device)


def _companions(rows: Rows, *, is_gated: bool = False, **along: Any) -> ops.Companions:
    companions: ops.Companions = rows.companions(**along)
    return replace(companions, is_gated=is_gated)
