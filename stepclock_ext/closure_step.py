"""Closures: once in a micro step, or as often as LBFGS needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import ops
from .norm import Measurement
from .plain_step import apply_in_place
from .settlement import settle_skip, settle_update
from .step_info import StepInfo

if TYPE_CHECKING:
    from .optimizer import ClockedOptimizer
    from .window import Window

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
        known = window.loss_known and isinstance(loss, (Tensor, float, int))
        opt._count_plain_backward()
        window.is_pending = True
        window.loss_known = known
        if known:
            window.add_loss(loss, 1.0)


def step_by_closure(opt: ClockedOptimizer, closure: Callable[[], Any] | None) -> StepInfo:
    """One update of LBFGS. Every evaluation is clipped; a non-finite one undoes the update.

    Raises:
        TypeError: there is no closure.
    """
    if closure is None:
        raise TypeError("ClockedOptimizer.step: LBFGS needs a closure; call step(closure)")
    _refuse_earlier_backward(opt)
    opt._schedulers.refuse_ended()
    evaluations = _Evaluations(opt, closure)
    try:
        loss = evaluations.evaluate()
    except _NonFiniteError:
        loss = None  # what was measured decides below
    except BaseException:
        opt._window.broken = "the closure raised"
        raise
    opt.clock.tick_micro(opt._window.end_micro_step())
    window, measurement = opt._window, evaluations.measurement
    gradients = opt._pass.collect(seeded=window.seeded)
    if gradients.is_empty:
        opt.clock.drop_window()
        opt._start_window()
        return opt._info()
    if not evaluations.accepts(measurement):
        return settle_skip(opt, gradients, measurement)
    return _run_inner(opt, evaluations, loss, window)


def _run_inner(
    opt: ClockedOptimizer, evaluations: _Evaluations, loss: Any, window: Window
) -> StepInfo:
    """The inner update, from an evaluation that was accepted; all or nothing."""
    inner, first = opt.optimizers[0], evaluations.measurement
    undo = _snapshot(inner)
    opt._companions.start(opt._pass.rows)
    evaluations.replay = loss
    try:
        inner.step(evaluations.evaluate)
    except BaseException as error:
        undo()
        opt._window = window
        if isinstance(error, _NonFiniteError):
            gradients = opt._pass.collect(seeded=False)
            return settle_skip(opt, gradients, evaluations.measurement)
        window.broken = "the closure or the update raised"
        raise
    opt._window = window
    opt._companions.move_rest(opt._pass.rows, frozenset(), first.stats)
    return settle_update(opt, first)


def _snapshot(inner: Optimizer) -> Callable[[], None]:
    """Parameters and state as they are, and a function that brings them back.

    LBFGS replaces the tensors of its history and writes only those that stand in the state itself,
    so its lists are copied and their tensors are not.
    """
    params = [(p, p.detach().clone()) for group in inner.param_groups for p in group["params"]]
    states = [(state, _copied(state)) for state in inner.state.values()]

    def undo() -> None:
        with torch.no_grad():
            for p, before in params:
                p.copy_(before)
        known = [state for state, _ in states]
        for state in inner.state.values():
            if not any(state is other for other in known):
                state.clear()
        for state, saved in states:
            state.clear()
            state.update(saved)

    return undo


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    copies: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            copies[key] = value.clone()
        else:
            copies[key] = list(value) if isinstance(value, list) else value
    return copies


class _NonFiniteError(Exception):
    """An evaluation came out non-finite, and such updates are not to happen."""


class _Evaluations:
    """The user's closure as LBFGS calls it: gradients unscaled and clipped, each time anew.

    Attributes:
        replay: the loss of an evaluation that stands in ``.grad``; the next call returns it.
        measurement: of the last evaluation.
    """

    def __init__(self, opt: ClockedOptimizer, closure: Callable[[], Any]) -> None:
        self.opt = opt
        self.closure = closure
        self.replay: Any = None
        self.measurement = Measurement(ops.make_stats(), 0.0, 1.0, 0.0, finite=True)

    def accepts(self, measurement: Measurement) -> bool:
        """Whether an update may go through this evaluation."""
        return measurement.finite or self.opt.nonfinite == "propagate"

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
        if not isinstance(loss, (Tensor, float, int)):
            raise TypeError(
                f"ClockedOptimizer.step: the closure must return the loss, got {loss!r}"
            )
        if not window.is_pending:
            opt._count_plain_backward()
            window.loss_known = True
            window.add_loss(loss, 1.0)
        window.is_pending = False
        gradients = opt._pass.collect(seeded=False)
        divisor = window.divisor(opt.reduction) or 1.0
        self.measurement = opt._pass.measure(gradients, opt._clip, divisor=divisor)
        if not self.accepts(self.measurement):
            raise _NonFiniteError
        apply_in_place(opt._pass.rows, gradients, self.measurement)
        return loss


def _refuse_earlier_backward(opt: ClockedOptimizer) -> None:
    """A gradient that came before the closure would be counted with the closure's own."""
    if opt._window.is_pending or opt._pass.accumulator.has_unseen():
        raise RuntimeError(
            "ClockedOptimizer.step: a backward ran before step(closure) in the same micro step; "
            "leave it to the closure, or call discard() first"
        )
