"""From a window's gradients to changed parameters: collect, measure, decide, update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from . import ops
from .accumulator import Accumulator, WindowGradients
from .errors import NonFiniteGradientError
from .norm import Measurement, measure, nonfinite_rows
from .parameters import ParameterRows, parameter_names
from .updater import Updater

__all__ = ["ClipSettings", "UpdatePass"]


@dataclass(frozen=True)
class ClipSettings:
    """How a window's norm is taken and what it may be; None does not clip."""

    max_grad_norm: float | None
    norm_type: float


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
        model: torch.nn.Module | None,
    ) -> None:
        groups: list[dict[str, Any]] = []
        self._updaters: list[Updater] = []
        for inner in optimizers:
            first = len(groups)
            groups.extend(inner.param_groups)
            self._updaters.append(Updater(inner, range(first, len(groups))))
        self.rows = ParameterRows(groups, backend)
        self.names = parameter_names(groups, model)
        self.accumulator = Accumulator(self.rows, self.names.__getitem__)

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
        on_start: Callable[[], None],
    ) -> None:
        """Moves every optimizer once; all have agreed before the first one moves."""
        prepared = [updater.prepare(self.rows, gradients, self.names) for updater in self._updaters]
        on_start()
        for updater, plans in zip(self._updaters, prepared, strict=True):
            updater.update(self.rows, gradients, measurement, plans)

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
