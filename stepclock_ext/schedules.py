"""The learning rate as a pure function of the update: warm-up, decay, landing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

__all__ = [
    "DECAY_TYPES",
    "KINDS",
    "LANDING_KINDS",
    "SHAPE_PARAMETERS",
    "Schedule",
    "check_kind",
    "check_rates",
    "check_shape",
    "scale_learning_rate",
]

LANDING_KINDS = ("linear", "cosine", "cosine_with_min_lr", "polynomial", "warmup_stable_decay")
KINDS = (*LANDING_KINDS, "constant", "constant_with_warmup", "inverse_sqrt")
DECAY_TYPES = ("cosine", "linear", "1-sqrt")

# Which kind of schedule reads which parameter of its shape.
SHAPE_PARAMETERS = {
    "power": "polynomial",
    "timescale": "inverse_sqrt",
    "num_decay_steps": "warmup_stable_decay",
    "decay_type": "warmup_stable_decay",
}
_TIMESCALE = 10_000  # of inverse_sqrt without warm-up, as big_vision and transformers have it


@dataclass(frozen=True)
class Schedule:
    """A learning rate for each update of a run, as a value. Updates count from 1.

    W is `warmup_updates`, T is `total_updates`; decay falls from 1 to 0 where the kind lands::

        lr_at(u) = learning_rate * u / W                               u <= W, so W has the peak
                   min_lr + (learning_rate - min_lr) * decay(p)        p = (u - W) / (T - W)
                   the rate of update T                                u > T

    Linear, cosine, cosine_with_min_lr, polynomial and warmup_stable_decay land: update T has
    exactly `min_lr`, unless W = T, where the run ends at the peak. The others do not land;
    inverse_sqrt falls towards `min_lr`. The shapes are those of ``transformers.optimization`` (its
    ``current_step`` is our update), which has inverse_sqrt from big_vision; warmup_stable_decay is
    of Hu et al. 2024 (MiniCPM). One thing differs: every warm-up starts at 0.

    Args:
        kind: one of `KINDS`.
        learning_rate: the peak.
        total_updates: T.
        warmup_updates: W; 0 for "constant".
        min_lr: the landing.
        power: of polynomial; 1 is a straight line.
        timescale: of inverse_sqrt, in updates; None is W, or 10,000 without warm-up.
        num_decay_steps: last updates of warmup_stable_decay, in which it falls; None is a tenth of
            T (or T - W, if that is less).
        decay_type: how warmup_stable_decay falls: one of `DECAY_TYPES`.

    Raises:
        TypeError, ValueError: an argument is outside its range; the message names it.

    Example:
        >>> schedule = Schedule(
        ...     "cosine", learning_rate=1e-3, min_lr=1e-4, warmup_updates=10, total_updates=110
        ... )
        >>> [schedule.lr_at(update) for update in (5, 10, 60, 110, 111)]
        [0.0005, 0.001, 0.00055, 0.0001, 0.0001]
    """

    kind: str
    _: KW_ONLY
    learning_rate: float
    total_updates: int
    warmup_updates: int = 0
    min_lr: float = 0.0
    power: float = 1.0
    timescale: float | None = None
    num_decay_steps: int | None = None
    decay_type: str = "cosine"

    def __post_init__(self) -> None:
        check_kind("Schedule", "kind", self.kind)
        check_rates("Schedule", self.learning_rate, self.min_lr)
        total, warmup = self.total_updates, self.warmup_updates
        if not _is_count(total) or total < 1:
            raise ValueError(f"Schedule: total_updates must be a positive integer, got {total!r}")
        if not _is_count(warmup) or not 0 <= warmup <= total:
            raise ValueError(
                f"Schedule: warmup_updates must be an integer from 0 to total_updates={total}, got "
                f"{warmup!r}"
            )
        if self.kind == "constant" and warmup:
            raise ValueError(
                f"Schedule: warmup_updates must be 0 for 'constant', got {warmup}; use "
                "'constant_with_warmup'"
            )
        shape = {name: getattr(self, name) for name in SHAPE_PARAMETERS}
        check_shape("Schedule", shape, span=total - warmup)

    @property
    def lands(self) -> bool:
        """Whether the last update has exactly `min_lr`."""
        return self.kind in LANDING_KINDS and self.warmup_updates < self.total_updates

    def lr_at(self, update: int) -> float:
        """The rate that `update` uses; the first one is 1.

        Raises:
            ValueError: `update` is not a whole number of 1 or more.
        """
        if not update >= 1 or update % 1:
            raise ValueError(
                f"Schedule.lr_at: update must be a whole number from 1 on, got {update!r}; "
                "lr_at_position takes fractions"
            )
        return self._rate(update)

    def lr_at_position(self, position: float) -> float:
        """The rate at any `position` of 0 or more, in updates; whole positions are `lr_at`.

        A schedule in samples reads here between two updates. At 0 it is where the warm-up starts.

        Raises:
            ValueError: `position` is negative or not a number.
        """
        if not position >= 0:
            raise ValueError(f"Schedule.lr_at_position: position must be 0 or more, got {position}")
        return self._rate(position)

    def _rate(self, position: float) -> float:
        peak, warmup, total = self.learning_rate, self.warmup_updates, self.total_updates
        if position <= warmup:
            return peak * (position / warmup) if warmup else peak
        if warmup == total:
            return peak
        progress = (position - warmup) / (total - warmup) if position < total else 1.0
        low = self.min_lr
        rate = low + (peak - low) * _DECAYS[self.kind](self, progress)
        return rate if rate < peak else peak  # low + (peak - low) may round above the peak

    def decay(self, progress: float) -> float:
        """The bare shape after warm-up: 1 at `progress` 0, and 0 at 1 where the kind lands.

        Raises:
            ValueError: `progress` is not between 0 and 1.
        """
        if not 0 <= progress <= 1:
            raise ValueError(f"Schedule.decay: progress must be from 0 to 1, got {progress!r}")
        return _DECAYS[self.kind](self, progress)

    @cached_property
    def _decay_span(self) -> tuple[int, int]:
        """Updates after warm-up, and how many of them warmup_stable_decay falls in."""
        span = self.total_updates - self.warmup_updates
        return span, self.num_decay_steps or min(span, -(-self.total_updates // 10))


def _linear(schedule: Schedule, progress: float) -> float:
    return 1.0 - progress


def _cosine(schedule: Schedule, progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _polynomial(schedule: Schedule, progress: float) -> float:
    return float((1.0 - progress) ** schedule.power)


def _constant(schedule: Schedule, progress: float) -> float:
    return 1.0


def _inverse_sqrt(schedule: Schedule, progress: float) -> float:
    timescale = schedule.timescale or schedule.warmup_updates or _TIMESCALE
    updates = progress * (schedule.total_updates - schedule.warmup_updates)
    return math.sqrt(timescale / (timescale + updates))


def _warmup_stable_decay(schedule: Schedule, progress: float) -> float:
    span, num_decay = schedule._decay_span
    fallen = (progress * span - (span - num_decay)) / num_decay if num_decay else 0.0
    if fallen <= 0.0:
        return 1.0
    if schedule.decay_type == "cosine":
        return _cosine(schedule, fallen)
    return 1.0 - (fallen if schedule.decay_type == "linear" else math.sqrt(fallen))


_DECAYS: dict[str, Callable[[Schedule, float], float]] = {
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_min_lr": _cosine,
    "polynomial": _polynomial,
    "constant": _constant,
    "constant_with_warmup": _constant,
    "inverse_sqrt": _inverse_sqrt,
    "warmup_stable_decay": _warmup_stable_decay,
}


def scale_learning_rate(
    learning_rate: float, *, old_batch_size: int, new_batch_size: int, rule: str
) -> float:
    """`learning_rate`, found for one effective batch size, moved to another.

    Args:
        learning_rate: the rate that goes with `old_batch_size`.
        old_batch_size: samples an update, before.
        new_batch_size: samples an update, now.
        rule: "linear" (Goyal et al. 2017), "sqrt" (Krizhevsky 2014) or "none".

    Raises:
        ValueError: a batch size is not positive, or there is no such rule.

    Example:
        >>> scale_learning_rate(0.02, old_batch_size=20, new_batch_size=40, rule="linear")
        0.04
    """
    for name, size in (("old_batch_size", old_batch_size), ("new_batch_size", new_batch_size)):
        if not size > 0:
            raise ValueError(f"scale_learning_rate: {name} must be positive, got {size!r}")
    powers = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}
    if rule not in powers:
        raise ValueError(
            f"scale_learning_rate: rule must be 'linear', 'sqrt' or 'none', got {rule!r}"
        )
    return float(learning_rate * (new_batch_size / old_batch_size) ** powers[rule])


def check_kind(where: str, name: str, kind: Any) -> None:
    """Refuses what is no kind of schedule."""
    if kind not in KINDS:
        raise ValueError(f"{where}: {name} must be one of {', '.join(KINDS)}, got {kind!r}")


def check_rates(where: str, learning_rate: Any, min_lr: Any) -> None:
    """Refuses a peak that is not positive and a landing that is not between 0 and the peak."""
    for name, value in (("learning_rate", learning_rate), ("min_lr", min_lr)):
        if not _is_number(value):
            raise TypeError(f"{where}: {name} must be a number, got {value!r}")
    if not 0 < learning_rate < math.inf:
        raise ValueError(
            f"{where}: learning_rate must be positive and finite, got {learning_rate!r}"
        )
    if not 0 <= min_lr <= learning_rate:
        raise ValueError(
            f"{where}: min_lr must be from 0 to learning_rate={learning_rate!r}, got {min_lr!r}"
        )


def check_shape(where: str, shape: Mapping[str, Any], *, span: int) -> None:
    """Refuses a parameter of a shape that does not exist or is outside its range.

    Args:
        where: who asks, for the message.
        shape: parameters by name.
        span: updates after warm-up.
    """
    for name, value in shape.items():
        if name not in SHAPE_PARAMETERS:
            known = ", ".join(SHAPE_PARAMETERS)
            raise ValueError(f"{where}: a shape has no {name!r}; its parameters are {known}")
        holds, must = _shape_rule(name, value, span)
        if not holds:
            raise ValueError(f"{where}: {name} must be {must}, got {value!r}")


def _shape_rule(name: str, value: Any, span: int) -> tuple[bool, str]:
    """Whether `value` fits, and the rule in words."""
    if name == "decay_type":
        return value in DECAY_TYPES, f"one of {', '.join(DECAY_TYPES)}"
    if name == "num_decay_steps":
        holds = value is None or (_is_count(value) and 0 < value <= max(1, span))
        return holds, f"an integer from 1 to the {span} updates after warm-up, or None"
    positive = _is_number(value) and 0 < value < math.inf
    return positive or (name == "timescale" and value is None), "positive and finite"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
