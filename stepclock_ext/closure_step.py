"""Closures: once in a micro step, or as often as LBFGS needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .norm import Measurement
from .step_info import StepInfo
from .updater import apply_in_place

if TYPE_CHECKING:
    from .optimizer import ClockedOptimizer

__all__ = ["run_closure", "step_by_closure"]


def run_closure(opt: ClockedOptimizer, closure: Callable[[], Any]) -> None:
    """Runs `closure` as the forward and backward of one micro step.

    Raises:
        RuntimeError: a backward of this micro step ran before.
    """
    _refuse_earlier_backward(opt)
    window = opt._window
    try:
        with torch.enable_grad():
            loss = closure()
    except BaseException:
        window.broken = "the closure raised"
        raise
    if not window.is_pending:
        opt._count_plain_backward()
        window.is_pending = True
        if isinstance(loss, (Tensor, float, int)):
            window.loss_known = True
            window.add_loss(loss, 1.0)


def step_by_closure(opt: ClockedOptimizer, closure: Callable[[], Any] | None) -> StepInfo:
    """One update of LBFGS. Every evaluation is clipped; the first one decides whether to skip.

    Raises:
        TypeError: there is no closure.
    """
    if closure is None:
        raise TypeError("ClockedOptimizer.step: LBFGS needs a closure; call step(closure)")
    _refuse_earlier_backward(opt)
    opt._schedulers.refuse_ended()
    first = _Evaluations(opt, closure)
    loss = first.evaluate()
    opt.clock.tick_micro(opt._window.end_micro_step())
    gradients, measurement = opt._pass.accumulator.collect(), first.measurement
    assert measurement is not None
    if gradients.is_empty:
        opt.clock.drop_window()
        opt._start_window()
        return opt._info()
    if not measurement.finite and opt.nonfinite != "propagate":
        return opt._settle_skip(gradients, measurement)
    window = opt._window
    first.replay = loss
    try:
        opt.optimizers[0].step(first.evaluate)
    except BaseException:
        window.broken = "the closure or the update raised"
        raise
    opt._window = window
    return opt._settle_update(measurement)


class _Evaluations:
    """The user's closure as LBFGS calls it: gradients unscaled and clipped, each time anew."""

    def __init__(self, opt: ClockedOptimizer, closure: Callable[[], Any]) -> None:
        self.opt = opt
        self.closure = closure
        self.replay: Tensor | None = None
        self.measurement: Measurement | None = None

    def evaluate(self) -> Any:
        """The loss; gradients in ``.grad`` are ready for the inner optimizer."""
        if self.replay is not None:  # LBFGS begins with the evaluation that was just made
            loss, self.replay = self.replay, None
            return loss
        opt = self.opt
        opt._start_window()
        with torch.enable_grad():
            loss = self.closure()
        window = opt._window
        if not window.is_pending:
            opt._count_plain_backward()
            window.loss_known = True
            window.add_loss(loss, 1.0)
        window.is_pending = False
        gradients = opt._pass.collect(seeded=False)
        divisor = window.divisor(opt.reduction) or 1.0
        self.measurement = opt._pass.measure(gradients, opt._clip, divisor=divisor)
        if self.measurement.finite:
            apply_in_place(opt._pass.rows, gradients, self.measurement)
        return loss


def _refuse_earlier_backward(opt: ClockedOptimizer) -> None:
    """A gradient that came before the closure would be counted with the closure's own."""
    if opt._window.is_pending or opt._pass.accumulator.has_unseen():
        raise RuntimeError(
            "ClockedOptimizer.step: a backward ran before step(closure) in the same micro step; "
            "leave it to the closure, or call discard() first"
        )
