"""What one call of `step` did."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StepInfo"]


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
    noise_scale: float | None = None
