"""From a window's gradients to changed parameters: collect, measure, decide, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import ops
from .accumulator import Accumulator
from .bucket_reduction import BucketReduction
from .companions import ParameterCompanions
from .dtensors import like_parameter, local_part
from .errors import NonFiniteGradientError
from .local_optimizers import LocalOptimizers
from .master_weights import MasterWeights
from .norm import Across, Measurement, ShareSlots, Sums, measure, measure_on_device_, nonfinite_rows
from .parameters import ParameterRows
from .precision import Precision
from .sharded_states import ShardedStates
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
        names: of the parameters, one a row.
        local: whose local parts are updated; None where parameters lie here whole.
        make_reduction: makes what adds the sums over processes; None where we do not.
    """

    precision: Precision
    is_wide: bool
    with_norms: bool
    names: list[str]
    local: LocalOptimizers | None = None
    make_reduction: Callable[[ParameterRows], BucketReduction | None] | None = None


class UpdatePass:
    """The parameters of some optimizers under one window, one norm and one decision.

    Built for one set of parameter groups; built anew when they change.

    Attributes:
        rows: the parameters.
        names: one a row.
        accumulator: where their gradients go.
        shards: this process's slices of the parameters; None where it updates them whole.
        moved_rows: what is updated: `rows`, or the slices.
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
        self._companions = companions
        self.rows = _make_rows(optimizers, backend, settings)
        self.names = settings.names
        self._local = settings.local
        if settings.local is not None:
            companions.gather_from(settings.local.spread_values)
        if not settings.is_wide:
            buffers.clear()
        self.has_updated = False
        make = settings.make_reduction
        self.accumulator = Accumulator(
            self.rows,
            self.names.__getitem__,
            buffers,
            with_norms=settings.with_norms,
            reduction=None if make is None else make(self.rows),
        )
        self.shards: ShardedStates | None = None
        self.moved_rows = self.rows
        self._sums: Sums = self.accumulator
        reduction = self.accumulator.reduction
        if reduction is not None and reduction.shares:
            self.shards = ShardedStates(optimizers, self.rows, reduction)
            optimizers = self.shards.optimizers
            companions.gather_from(self.shards.gather_values)
            self.moved_rows = _make_rows(optimizers, backend, settings)
            slots = ops.make_slots(self.moved_rows.num_slots, backend.device)
            self._sums = ShareSlots(self.moved_rows, slots)
        self._updaters = _make_updaters(optimizers, companions, settings)

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
        if self.shards is not None:
            gradients = self.shards.cut_gradients(gradients, self.moved_rows)
        for updater in self._updaters:
            updater.check(self.moved_rows, gradients, self.names)
        return gradients

    def measure(
        self,
        gradients: WindowGradients,
        settings: ClipSettings,
        *,
        divisor: float,
        across: Across | None = None,
    ) -> Measurement:
        """Norm, finiteness and coefficient of the window."""
        if self.shards is not None:
            self._sums.slots.zero_()  # of slices that took part in an earlier window
        return measure(
            self._sums,
            gradients,
            divisor=divisor,
            max_norm=settings.max_grad_norm,
            norm_type=settings.norm_type,
            across=across,
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
        rows, names = self.moved_rows, self.names
        for part in (self.shards, self._local):
            if part is not None:
                part.follow()
        self._companions.start(rows)
        return [u.prepare(rows, gradients, names, update, is_gated) for u in self._updaters]

    def update(
        self, gradients: WindowGradients, measurement: Measurement, prepared: Sequence[Plans]
    ) -> None:
        """Moves every optimizer once."""
        for updater, plans in zip(self._updaters, prepared, strict=True):
            updater.update(self.moved_rows, gradients, measurement, plans)
        self._companions.move_rest(self.moved_rows, _moved_rows(prepared), measurement.stats)
        if self._local is not None:
            self._local.publish()
        if self.shards is not None:
            self.shards.gather_parameters()
            self._companions.settle_all()
        self.has_updated = True

    def master_value(self, p: Tensor) -> Tensor:
        """The exact value of a parameter, as a new tensor; with shards, collective."""
        masters = self._companions.masters or MasterWeights()
        if self.shards is None:
            return like_parameter(p, masters.value(local_part(p)))
        row = self.rows.row_of(p)
        if row is None:
            return masters.value(p)
        part = self.shards.slices[row]
        return self.shards.gather_values({part: masters.value(part)})[p]

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
        self, what: str, gradients: WindowGradients, update: int, across: Across | None = None
    ) -> NonFiniteGradientError:
        """The error that names the parameters whose gradients are not finite, on any rank."""
        rows: Sequence[int] = nonfinite_rows(gradients)
        if across is not None:
            found = across.ranks.any([row in rows for row in self.rows.every_row], across.what)
            rows = [row for row in self.rows.every_row if found[row]]
        names = [self.names[row] for row in rows]
        listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        return NonFiniteGradientError(
            f"ClockedOptimizer: {what} at update {update}, in {listed or 'their sum alone'}; look "
            "for a division by zero or a log of zero in the loss, lower the learning rate, or clip",
            names,
        )


def _make_rows(
    optimizers: Sequence[Optimizer], backend: ops.Backend, settings: PassSettings
) -> ParameterRows:
    return ParameterRows(
        [group for inner in optimizers for group in inner.param_groups],
        backend,
        is_wide=settings.is_wide,
        has_masters=settings.precision.master_weights,
    )


def _make_updaters(
    optimizers: Sequence[Optimizer], companions: ParameterCompanions, settings: PassSettings
) -> list[Updater]:
    updaters: list[Updater] = []
    first = 0
    for inner in optimizers:
        mine = range(first, first + len(inner.param_groups))
        first = mine.stop
        updaters.append(Updater(inner, mine, companions, needs_rule=settings.precision.needs_rule))
    return updaters


def _moved_rows(prepared: Sequence[Plans]) -> set[int]:
    """Rows that a rule moves, with their averages."""
    return {row for plans in prepared for plan in plans or () for row in plan.bound.rows}
