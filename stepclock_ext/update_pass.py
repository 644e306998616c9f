"""From a window's gradients to changed parameters: collect, measure, decide, update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import ops
from .accumulator import Accumulator
from .companions import ParameterCompanions
from .errors import NonFiniteGradientError
from .norm import Measurement, measure, nonfinite_rows
from .parameters import ParameterRows, parameter_names
from .precision import Precision
from .updater import Updater
from .window_gradients import WindowGradients

__all__ = ["ClipSettings", "PassSettings", "UpdatePass"]


@dataclass(frozen=True)
class ClipSettings:
    """How a window's norm is taken and what it may be; None does not clip."""

    max_grad_norm: float | None
    norm_type: float


@dataclass(frozen=True)
class PassSettings:
    """What a pass is built for, beside the optimizers.

    Attributes:
        precision: as asked for.
        is_wide: 16-bit gradients are added in fp32.
        with_norms: the norm of each micro gradient is wanted.
        model: gives parameters their names.
    """

    precision: Precision
    is_wide: bool
    with_norms: bool
    model: torch.nn.Module | None


class UpdatePass:
    """The parameters of some optimizers under one window, one norm and one decision.

    Built for one set of parameter groups; built anew when they change.

    Attributes:
        rows: the parameters.
        names: one a row.
        accumulator: where their gradients go.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        backend: ops.Backend,
        settings: PassSettings,
        companions: ParameterCompanions,
        buffers: dict[Tensor, Tensor],
    ) -> None:
        groups: list[dict[str, Any]] = []
        self._updaters: list[Updater] = []
        for inner in optimizers:
            first = len(groups)
            groups.extend(inner.param_groups)
            mine = range(first, len(groups))
            self._updaters.append(
                Updater(inner, mine, companions, needs_rule=settings.precision.needs_rule)
            )
        self._companions = companions
        self.rows = ParameterRows(
            groups,
            backend,
            is_wide=settings.is_wide,
            has_masters=settings.precision.master_weights,
        )
        self.names = parameter_names(groups, settings.model)
        if not settings.is_wide:
            buffers.clear()
        self.accumulator = Accumulator(
            self.rows, self.names.__getitem__, buffers, with_norms=settings.with_norms
        )

    def collect(self, *, seeded: bool) -> WindowGradients:
        """The window's gradients, checked by everybody who will need them.

        Args:
            seeded: a backward put a gradient into this window, so there must be one.

        Raises:
            RuntimeError: gradients disappeared.
            TypeError: an optimizer cannot take a sparse gradient.
        """
        gradients = self.accumulator.collect()
        if gradients.is_empty and seeded:
            raise RuntimeError(
                "ClockedOptimizer: backward ran, and yet no parameter holds a gradient; does a "
                "hook take them, or do they belong to other parameters than the optimizer's?"
            )
        for updater in self._updaters:
            updater.check(self.rows, gradients, self.names)
        return gradients

    def measure(
        self, gradients: WindowGradients, settings: ClipSettings, *, divisor: float
    ) -> Measurement:
        """Norm, finiteness and coefficient of the window."""
        return measure(
            self.accumulator,
            gradients,
            divisor=divisor,
            max_norm=settings.max_grad_norm,
            norm_type=settings.norm_type,
        )

    def update(
        self,
        gradients: WindowGradients,
        measurement: Measurement,
        *,
        update: int,
        on_start: Callable[[], None],
    ) -> None:
        """Moves every optimizer once; all have agreed before the first one moves."""
        rows, names = self.rows, self.names
        self._companions.start(rows)
        prepared = [u.prepare(rows, gradients, names, update) for u in self._updaters]
        on_start()
        for updater, plans in zip(self._updaters, prepared, strict=True):
            updater.update(rows, gradients, measurement, plans)
        by_rule = (plan for plans in prepared for plan in plans or ())
        moved = {row for plan in by_rule for row in plan.bound.rows}
        self._companions.finish(rows, moved, measurement.stats)

    def nonfinite_error(
        self, what: str, gradients: WindowGradients, update: int
    ) -> NonFiniteGradientError:
        """The error that names the parameters whose gradients are not finite."""
        names = [self.names[row] for row in nonfinite_rows(gradients)]
        listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        return NonFiniteGradientError(
            f"ClockedOptimizer: {what} at update {update}, in {listed or 'their sum alone'}; look "
            "for a division by zero or a log of zero in the loss, lower the learning rate, or clip",
            names,
        )
