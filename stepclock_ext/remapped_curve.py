"""The learning rate after a remap: what was used before, and a new rest."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

from .sample_map import SampleMap
from .schedules import Schedule

__all__ = ["REMAPS", "AnyCurve", "RemappedCurve"]

REMAPS = ("by_samples", "by_progress", "keep_lr", "hold")
_NESTED = {"shape": Schedule, "samples": SampleMap}


@dataclass(frozen=True)
class RemappedCurve:
    """A learning rate for each update of a run whose plan was changed after update `start`.

    u0 is `start`, R is `remaining`, f is `factor`, c the rate of update u0 on the curve before::

        lr_at(u)            before.lr_at(u)                                    u <= u0
        p                   u0 + (T - u0) * share, T = before.total_updates    its place before
          by_progress       share = (u - u0) / R
          by_samples        share = by the samples seen, in the old plan's updates
        by_*                f * before(p)                                      before the peak, or
                                                                               it does not land
                            min_lr + (f * top - min_lr) * fall(p)              else
        keep_lr             min_lr + (f * c - min_lr) * shape.decay((u - u0) / R)
        hold                f * c

    fall goes from 1 to 0 as the curve before falls from top (its peak, if that is still to come,
    else c) to its own landing: the rest is multiplied by f at its start, and the landing never.
    Update u0 + R has exactly `min_lr` where the curve lands; past it the rate stays. With R = 0 it
    is `min_lr`, unless held. Only plain values: ``RemappedCurve(**dataclasses.asdict(curve))`` is
    `curve`.

    Args:
        how: one of `REMAPS`.
        before: the curve that update u0 used; remapped itself, maybe.
        start: u0.
        remaining: R.
        learning_rate: the base rate of the groups now.
        min_lr: the landing.
        factor: f.
        samples: for "by_samples".
        shape: for "keep_lr".

    Raises:
        ValueError: there is no such remap.

    Example:
        >>> line = Schedule("linear", learning_rate=1.0, total_updates=100)
        >>> curve = RemappedCurve(
        ...     "by_progress", before=line, start=50, remaining=25, learning_rate=1.0, min_lr=0.0
        ... )
        >>> [curve.lr_at(update) for update in (49, 50, 51, 75, 76)]
        [0.51, 0.5, 0.48, 0.0, 0.0]
    """

    how: str
    _: KW_ONLY
    before: Schedule | RemappedCurve
    start: int
    remaining: int
    learning_rate: float
    min_lr: float
    factor: float = 1.0
    samples: SampleMap | None = None
    shape: Schedule | None = None

    def __post_init__(self) -> None:
        if self.how not in REMAPS:
            raise ValueError(
                f"RemappedCurve: how must be one of {', '.join(REMAPS)}, got {self.how!r}"
            )
        for name, kind in _NESTED.items():
            value = getattr(self, name)
            if isinstance(value, Mapping):
                object.__setattr__(self, name, kind(**value))
        before: Any = self.before
        if isinstance(before, Mapping):
            read: Any = RemappedCurve if "how" in before else Schedule
            object.__setattr__(self, "before", read(**before))

    @property
    def total_updates(self) -> int:
        """The last update of the run."""
        return self.start + self.remaining

    @property
    def lands(self) -> bool:
        """Whether the last update has exactly `min_lr`."""
        if self.how == "hold":
            return False
        if self.remaining == 0:
            return True
        return self.before.lands if self.shape is None else self.shape.lands

    @cached_property
    def warmup_updates(self) -> int:
        """The first update at the peak or past it; 0 without warm-up."""
        done = self.before.warmup_updates
        if done <= self.start or not self._by_position:
            return min(done, self.start)
        updates = range(self.start, self.total_updates + 1)
        reached = bisect_left(updates, float(done), key=self.place_before)
        return min(self.start + reached, self.total_updates)

    def lr_at(self, update: int) -> float:
        """The rate that `update` uses; the first one is 1.

        Raises:
            ValueError: `update` is not a whole number of 1 or more.
        """
        if update <= self.start or update % 1:
            return self.before.lr_at(update)
        return self.rest_at(update)

    def lr_at_position(self, position: float) -> float:
        """The rate at any `position` of 0 or more, in updates."""
        if position < self.start:
            return self.before.lr_at_position(position)
        return self.rest_at(position)

    def rest_at(self, position: float) -> float:
        """The rate of the new rest, from `start` on; there, it is where the rest begins."""
        if self.how == "hold":
            return self.factor * self._rate_before
        done = min(position - self.start, self.remaining)
        if done == self.remaining and self.lands:
            return self.min_lr
        if self.shape is not None:
            fall = self.shape.decay(done / self.remaining)
            return _between(self.min_lr, self.factor * self._rate_before, fall)
        return self._scaled(self.place_before(position))

    def place_before(self, position: float) -> float:
        """Where on the curve before the rate of `position` is read, in its updates."""
        done, end = position - self.start, self.before.total_updates
        if done >= self.remaining or end <= self.start:
            return max(end, self.start)
        share = done / self.remaining if self.samples is None else self.samples.share(done)
        return self.start + (end - self.start) * share

    def in_warmup(self, position: float) -> bool:
        """Whether the peak is still to come, or is just reached, at `position`."""
        if position >= self.start:
            if not self._by_position:
                return False
            position = self.place_before(position)
        return _in_warmup(self.before, position)

    @cached_property
    def peak(self) -> float:
        """The highest rate of the warm-up, where it ends in the new rest."""
        return self.factor * _peak(self.before)

    @property
    def _by_position(self) -> bool:
        return self.how in ("by_samples", "by_progress")

    @cached_property
    def _rate_before(self) -> float:
        """The current rate; before the first update, the one it would have used."""
        return self.before.lr_at_position(max(1, self.start))

    @cached_property
    def _top(self) -> float:
        if _in_warmup(self.before, self.start):
            return _peak(self.before)
        return self.before.lr_at_position(self.start)

    def _scaled(self, place: float) -> float:
        rate, low = self.before.lr_at_position(place), self.before.min_lr
        unchanged = self.factor == 1.0 and self.min_lr == low
        if unchanged or not self.before.lands or _in_warmup(self.before, place):
            return self.factor * rate
        if self._top == low:
            return self.min_lr  # the curve before has landed
        fall = (rate - low) / (self._top - low)
        return _between(self.min_lr, self.factor * self._top, fall)


AnyCurve = Schedule | RemappedCurve


def _between(low: float, high: float, share: float) -> float:
    """`low` at share 0 and `high` at 1, both exactly."""
    return high if share == 1.0 else low + (high - low) * share


def _in_warmup(curve: AnyCurve, position: float) -> bool:
    if isinstance(curve, RemappedCurve):
        return curve.in_warmup(position)
    return curve.warmup_updates > 0 and position <= curve.warmup_updates


def _peak(curve: AnyCurve) -> float:
    return curve.peak if isinstance(curve, RemappedCurve) else curve.learning_rate
