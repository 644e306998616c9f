"""What moves along with the parameters in an update: masters, averages, and the rounding."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from . import ops
from .ema import EMA
from .master_weights import MasterWeights
from .parameters import ParameterRows
from .update_rules import BoundGroup

__all__ = ["ParameterCompanions", "new_rounding_seed"]


@dataclass(eq=False)
class ParameterCompanions:
    """What one wrapper keeps beside its parameters.

    Attributes:
        masters: exact fp32 values; None where they are not kept.
        ema: averaged weights; None where they are not wanted.
        rounding_seed: of stochastic rounding; None rounds to nearest.
    """

    masters: MasterWeights | None = None
    ema: EMA | None = None
    rounding_seed: int | None = None

    def prepare(self, bound: BoundGroup, update: int, is_gated: bool) -> ops.Companions:
        """The companions of a group in one update, before anything moves."""
        if self.masters is not None:
            self.masters.follow(bound.params)
        seed = self.rounding_seed
        key = None if seed is None else ops.update_key(seed, update)
        return self._companions(*self._columns(bound), key, is_gated)

    def settle(self, bound: BoundGroup) -> None:
        """The group has moved."""
        if self.masters is not None:
            self.masters.settle(bound.params)

    def start(self, rows: ParameterRows) -> None:
        """Averages begin as copies of the parameters, before their first update."""
        if self.ema is not None:
            value_of = None if self.masters is None else self.masters.value
            self.ema.column(rows.params, value_of)

    def follow(self, bound: BoundGroup) -> None:
        """A step hook may have written parameters since `prepare`."""
        if self.masters is not None:
            self.masters.follow(bound.params)

    def follow_all(self, rows: ParameterRows) -> None:
        """As `follow`, for every parameter."""
        if self.masters is not None:
            self.masters.follow(rows.params)

    def settle_all(self) -> None:
        """The parameters are those that the masters belong to: a model has just been loaded."""
        if self.masters is not None:
            self.masters.settle_all()

    def count_update(self) -> None:
        """An update has happened, and was no skip."""
        if self.ema is not None:
            self.ema.updates += 1

    def gather_from(self, gather: Callable[[dict[Tensor, Tensor]], dict[Tensor, Tensor]]) -> None:
        """Averages are of parts; `gather` makes those of parameters when they are wanted."""
        ema = self.ema
        if ema is not None:
            ema.gather = lambda: gather(ema._averages)

    def move_rest(
        self, rows: ParameterRows, moved: Set[int], stats: Tensor, *, is_gated: bool = False
    ) -> None:
        """Moves the averages of all rows but those in `moved`."""
        if self.ema is None:
            return
        rest = [row for row in rows.every_row if row not in moved]
        walked = tuple(row for row in rest if row in rows.walked and rows.fits(row))
        if walked:
            params = [rows.params[row] for row in walked]
            if self.masters is not None:
                self.masters.follow(params)
            masters = None if self.masters is None else self.masters.column(params)
            along = self._companions(masters, self.ema.column(params), None, is_gated)
            ops.move_average_(params, stats, rows.layout(walked), along)
        for row in set(rest).difference(walked):
            p = rows.params[row].detach()
            average = self.ema.column([rows.params[row]])[0]
            value = p.to(average.dtype)
            apart = (value - average).masked_fill(value == average, 0.0)  # -inf - -inf is NaN
            average.add_(apart, alpha=self.ema.next_weight)

    def _columns(self, bound: BoundGroup) -> tuple[list[Tensor] | None, list[Tensor] | None]:
        """Masters and averages of a group; the same lists as long as nothing was replaced."""
        if bound.companions is None or bound.companions[0] != self._generation():
            masters = None if self.masters is None else self.masters.column(bound.params)
            averages = None if self.ema is None else self.ema.column(bound.params)
            bound.companions = (self._generation(), masters, averages)
        return bound.companions[1:]

    def _generation(self) -> tuple[int, int]:
        return (
            0 if self.masters is None else self.masters.generation,
            0 if self.ema is None else self.ema.generation,
        )

    def _companions(
        self,
        masters: list[Tensor] | None,
        averages: list[Tensor] | None,
        key: int | None,
        is_gated: bool,
    ) -> ops.Companions:
        weight = 0.0 if self.ema is None else self.ema.next_weight
        return ops.Companions(masters, averages, weight, key, is_gated)


def new_rounding_seed() -> int:
    """From torch's own seed, so that ``torch.manual_seed`` makes a run repeatable."""
    return torch.initial_seed() & (2**64 - 1)
