"""What one call of `step` did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["LateStepInfo", "StepInfo"]


@dataclass(frozen=True)
class StepInfo:
    """The outcome of a micro step, and of the update where the window ended with it.

    Attributes:
        updated: the parameters changed.
        skipped: the window was complete and its gradients were not finite; nothing changed.
        loss: mean over the window, weighted as the gradient is (with ``reduction="sum"`` the sum);
            None inside a window and after a plain ``loss.backward()``.
        grad_norm: global norm of the mean gradient, unscaled, before the clip; None inside a
            window. On a skip, what was found.
        clipped_norm: the same after the clip.
        lr: learning rate of each parameter group, as this update used it.
        loss_scale: the scale this window's losses were seeded with; None without one.
        micro_step: micro steps so far.
        update_step: updates so far.
        noise_scale: the simple gradient noise scale (McCandlish et al. 2018), averaged over
            updates; None where it is not asked for or this window cannot tell.
    """

    updated: bool
    skipped: bool
    loss: float | None
    grad_norm: float | None
    clipped_norm: float | None
    lr: tuple[float, ...]
    loss_scale: float | None
    micro_step: int
    update_step: int
    noise_scale: float | None = field(default_factory=lambda: None)  # no attribute of the class


class LateStepInfo(StepInfo):
    """An outcome that is not known yet: the first look at it settles the update, and waits.

    It is a plain `StepInfo` from then on.
    """

    def __init__(self, read: Callable[[], StepInfo]) -> None:
        object.__setattr__(self, "_read", read)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_read" not in vars(self):
            raise AttributeError(name)
        info = vars(self)["_read"]()
        del vars(self)["_read"]
        vars(self).update(vars(info))
        object.__setattr__(self, "__class__", StepInfo)
        return getattr(self, name)

    # What dataclasses look at before any field.

    def __repr__(self) -> str:
        return repr(self.updated) and StepInfo.__repr__(self)

    def __eq__(self, other: object) -> bool:
        return self.updated in (True, False) and StepInfo.__eq__(self, other)

    __hash__ = StepInfo.__hash__

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.updated in (True, False) and object.__reduce_ex__(self, protocol)
