"""Dynamic loss scale: a frozen value whose `after` returns the next one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

__all__ = ["LossScale"]


@dataclass(frozen=True)
class LossScale:
    """The factor on the loss that keeps fp16 gradients from underflow.

    Micikevicius et al. 2018, section 3.3, as ``torch.amp.GradScaler`` runs it, with a floor::

        after(finite=False):  scale = max(min_scale, scale * backoff_factor); good_steps = 0
        after(finite=True):   good_steps += 1
                              if good_steps == growth_interval:
                                  scale *= growth_factor (unless that is no finite fp32)
                                  good_steps = 0

    Args:
        init_scale: the first scale.
        growth_factor: at least 1.
        backoff_factor: between 0 and 1.
        growth_interval: updates in a row without a skip before the scale grows.
        min_scale: the floor; backing off stops there.
        scale: the scale in force; `init_scale` unless given.
        good_steps: updates since the last change of the scale.

    Raises:
        ValueError: an argument is outside its range.

    Example:
        >>> scale = LossScale(init_scale=1024.0, growth_interval=2)
        >>> scale.after(False).scale
        512.0
        >>> scale.after(True).after(True).scale
        2048.0
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 1.0
    scale: float = 0.0
    good_steps: int = 0

    def __post_init__(self) -> None:
        if self.scale == 0.0:
            object.__setattr__(self, "scale", float(self.init_scale))
        rules = (
            ("init_scale", self.init_scale > 0 and math.isfinite(self.init_scale), "positive"),
            ("scale", self.scale > 0 and math.isfinite(self.scale), "positive"),
            ("growth_factor", 1 <= self.growth_factor < math.inf, "at least 1"),
            ("backoff_factor", 0 < self.backoff_factor < 1, "between 0 and 1"),
            ("growth_interval", _is_count(self.growth_interval), "a positive integer"),
            ("min_scale", 0 < self.min_scale <= self.init_scale, "positive, at most init_scale"),
            ("good_steps", self.good_steps >= 0, "0 or more"),
        )
        for name, holds, must in rules:
            if not holds:
                raise ValueError(f"LossScale: {name} must be {must}, got {getattr(self, name)!r}")

    def after(self, finite: bool) -> LossScale:
        """The scale for the next window, given whether this window's gradients were finite."""
        if not finite:
            lower = max(self.min_scale, self.scale * self.backoff_factor)
            return replace(self, scale=lower, good_steps=0)
        if self.good_steps + 1 < self.growth_interval:
            return replace(self, good_steps=self.good_steps + 1)
        grown = self.scale * self.growth_factor
        return replace(self, scale=grown if grown < _FP32_MAX else self.scale, good_steps=0)

    def state_dict(self) -> dict[str, float | int]:
        """Every field, as plain Python values."""
        return dict(vars(self))


_FP32_MAX = 2.0**127 * (2 - 2.0**-23)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
