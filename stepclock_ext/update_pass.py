"""From a window's gradients to changed parameters: collect, measure, decide, update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import ops
from .accumulator import Accumulator
from .companions import ParameterCompanions
from .errors import NonFiniteGradientError
from .norm import Measurement, measure, measure_on_device_, nonfinite_rows
from .parameters import ParameterRows, parameter_names
from .precision import Precision
from .updater import RulePlan, Updater
from .window_gradients import WindowGradients

__all__ = ["ClipSettings", "PassSettings", "UpdatePass"]


# What the fused rule will run for one optimizer; None where its own step will.
Plans = list[RulePlan] | None


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
        has_updated: an update has run in this pass, so that states are there.
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
        self.has_updated = False
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

    def measure_on_device(
        self, gradients: WindowGradients, settings: ClipSettings, *, divisor: float
    ) -> Tensor:
        """The same as the stats that kernels read, which nobody waits for."""
        stats = torch.empty(3, dtype=torch.float64, device=self.rows.backend.device)
        measure_on_device_(
            stats,
            self.accumulator,
            gradients,
            divisor=divisor,
            max_norm=settings.max_grad_norm,
            maxima=settings.norm_type == math.inf,
        )
        return stats

    def prepare(
        self, gradients: WindowGradients, *, update: int, is_gated: bool = False
    ) -> list[Plans]:
        """What each optimizer will do in this update; all have agreed before the first one moves.

        Args:
            gradients: of the window.
            update: its number, from 1.
            is_gated: the kernels look at the norm themselves.
        """
        rows, names = self.rows, self.names
        self._companions.start(rows)
        return [u.prepare(rows, gradients, names, update, is_gated) for u in self._updaters]

    def update(
        self, gradients: WindowGradients, measurement: Measurement, prepared: Sequence[Plans]
    ) -> None:
        """Moves every optimizer once."""
        for updater, plans in zip(self._updaters, prepared, strict=True):
            updater.update(self.rows, gradients, measurement, plans)
        self._companions.move_rest(self.rows, _moved_rows(prepared), measurement.stats)
        self.has_updated = True

    def is_bound(self, gradients: WindowGradients) -> bool:
        """Whether the rules have run on these rows before, so that their states are there."""
        return all(updater.is_bound(self.rows, gradients) for updater in self._updaters)

    def is_rule_alone(self, prepared: Sequence[Plans]) -> bool:
        """Whether nothing but our kernels will move: no step hook, and no state to be made."""
        alone = zip(self._updaters, prepared, strict=True)
        return all(updater.is_rule_alone(plans) for updater, plans in alone)

    def update_on_device(self, prepared: Sequence[Plans], stats: Tensor) -> None:
        """As `update`, where it is our rules' alone and gated."""
        for updater, plans in zip(self._updaters, prepared, strict=True):
            updater.update_on_device(plans or [], stats)
        self._companions.move_rest(self.rows, _moved_rows(prepared), stats, is_gated=True)

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


def _moved_rows(prepared: Sequence[Plans]) -> set[int]:
    """Rows that a rule moves, with their averages."""
    return {row for plans in prepared for plan in plans or () for row in plan.bound.rows}
