"""Settings that hold for a whole window: a change waits for the next one."""

from __future__ import annotations

from dataclasses import dataclass

from .loss_scale import LossScale

__all__ = ["WindowSettings"]


@dataclass
class WindowSettings:
    """Window length, loss scale, and how many windows in a row were skipped.

    Attributes:
        steps: micro steps in a window, as in force.
        loss_scale: None, static, or dynamic.
        consecutive_skips: skipped updates since the last good one.
        next_steps: takes force with the next window.
        next_loss_scale: likewise, in a tuple of one; None where nothing waits.
    """

    steps: int
    loss_scale: LossScale | float | None
    consecutive_skips: int = 0
    next_steps: int | None = None
    next_loss_scale: tuple[LossScale | float | None] | None = None

    def adopt(self) -> None:
        """A window begins: what waited is in force now."""
        if self.next_steps is not None:
            self.steps, self.next_steps = self.next_steps, None
        if self.next_loss_scale is not None:
            (self.loss_scale,) = self.next_loss_scale
            self.next_loss_scale = None

    def settle(self, *, finite: bool) -> None:
        """A window has ended in an update, or in a skip."""
        self.consecutive_skips = 0 if finite else self.consecutive_skips + 1
        if isinstance(self.loss_scale, LossScale):
            self.loss_scale = self.loss_scale.after(finite)

    @property
    def scale(self) -> float:
        """What losses are seeded with; 1 without a loss scale."""
        if isinstance(self.loss_scale, LossScale):
            return self.loss_scale.scale
        return 1.0 if self.loss_scale is None else self.loss_scale
