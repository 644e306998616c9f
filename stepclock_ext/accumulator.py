"""Where a micro gradient goes, watched over a whole window.

To a parameter's own ``.grad``, where autograd keeps the first gradient of a window and adds the
others in place; or, caught by a hook, to a sum of our own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import is_

import torch
from torch import Tensor

from . import ops
from .bucket_reduction import BucketReduction
from .caught_gradients import CaughtGradients
from .dtensors import local_part
from .noise_scale import MicroNorms
from .norm_ride import NormRide
from .parameters import ParameterRows
from .window_gradients import WindowGradients, make_walkable

__all__ = ["Accumulator"]


class Accumulator:
    """The window sums of one wrapper's parameters.

    Args:
        rows: the parameters.
        name_of: a row's name, for messages.
        buffers: fp32 sums by parameter, kept from one accumulator to the next.
        with_norms: the norm of each micro gradient is wanted: all rows are caught.
        reduction: adds the sums over processes: all rows are caught.

    Attributes:
        rows: the parameters.
        slots: the chunk sums of this window, fp64; zero between windows.
        caught: the sums that do not lie in ``.grad``.
        norms: of the micro gradients; None where they are not wanted.
        ride: the norm's free ride for the other sums.
        is_replaced: an engine puts gradients of its own into ``.grad`` in the last micro step.
    """

    def __init__(
        self,
        rows: ParameterRows,
        name_of: Callable[[int], str],
        buffers: dict[Tensor, Tensor] | None = None,
        *,
        with_norms: bool = False,
        reduction: BucketReduction | None = None,
    ) -> None:
        self.rows = rows
        self.slots = ops.make_slots(rows.num_slots, rows.backend.device)
        self._name_of = name_of
        self._held: list[Tensor | None] | None = None
        self._seen: list[tuple[int, int]] = [(0, 0)]
        caught = rows.wide if reduction is None and not with_norms else rows.every_row
        kept = {} if buffers is None else buffers
        late = () if reduction is None or with_norms else set(rows.every_row) - rows.wide
        self.caught = CaughtGradients(rows, caught, self.slots, kept, reduction, late)
        self.reduction = reduction
        self.is_replaced = False
        self._is_last = False
        self.norms = MicroNorms(rows, self.caught) if with_norms else None
        self.ride = NormRide(rows, self.slots, self.caught.rows)

    def grads(self) -> list[Tensor | None]:
        """Each row's sum as it is."""
        params, caught = self.rows.params, self.caught
        if not caught.rows:
            return [p.grad for p in params]
        return [
            p.grad if (total := caught.sum(row)) is None else total for row, p in enumerate(params)
        ]

    def is_empty(self) -> bool:
        """Whether no gradient has come."""
        self.caught.settle()
        return all(grad is None for grad in self.grads())

    def begin_micro_step(self, *, is_last: bool, wants_squares: bool = True) -> None:
        """The next gradients are those of the window's last micro step, or they are not.

        Args:
            is_last: they are known to be.
            wants_squares: the norm is made of chunk sums of squares.
        """
        self._is_last = is_last
        if is_last and self.is_replaced:
            self._held = None
        self.caught.is_last = is_last
        self.caught.sums.is_last = is_last and wants_squares and self.reduction is None

    def begin_backward(self) -> None:
        """Sees to it that gradients come to us, also if another wrapper was here meanwhile."""
        if not self.caught.is_watching():
            self.caught.watch()
        if self.reduction is not None and self._is_last:
            self.reduction.begin()

    def end_backward(self) -> None:
        """Every gradient of the backward is in."""
        if self.reduction is not None and self._is_last:
            self.reduction.end()

    def end_micro_step(self, weight: float) -> None:
        """The gradients of a micro step of this weight are all in."""
        self.caught.settle()
        if self.norms is not None:
            self.norms.end_micro_step(weight)

    def accumulated(self, p: Tensor) -> Tensor | None:
        """The sum of a parameter as it is; None where no gradient has come.

        Raises:
            ValueError: it is no parameter of these rows.
        """
        row = self.rows.row_of(local_part(p))
        if row is None:
            raise ValueError(
                "ClockedOptimizer.accumulated: p must be a parameter of this optimizer, got a "
                f"tensor of shape {tuple(p.shape)} that is none"
            )
        self.caught.settle()
        total = self.caught.sum(row)
        return p.grad if total is None else total

    def hold(self) -> None:
        """Remembers the accumulators of an open window, after each of its micro steps.

        Raises:
            RuntimeError: an accumulator of the window is gone.
        """
        grads = self.grads()
        self._check_held(grads)
        self._held = grads
        self._seen = self._sample()

    def has_unseen(self) -> bool:
        """Whether a gradient came or changed since `hold`, or since the window began.

        Of more than 512 parameters an even sample of 512 is watched.
        """
        return self._sample() != self._seen

    def _sample(self) -> list[tuple[int, int]]:
        """Identity and version of some gradients: a backward changes one or the other."""
        step = -(-len(self.rows.params) // 512)
        grads = (p.grad for p in self.rows.params[::step])
        seen = [(id(grad), grad._version) for grad in grads if grad is not None]
        return [(0, self.caught.arrivals), *seen]

    def held(self) -> dict[int, Tensor]:
        """The accumulators of the open window by row."""
        return {row: grad for row, grad in enumerate(self._held or ()) if grad is not None}

    def restore(self, accumulators: dict[int, Tensor]) -> None:
        """Makes `accumulators` the open window's, as `held` gave them."""
        for row, p in enumerate(self.rows.params):
            p.grad = None if self._is_caught(row, accumulators) else accumulators.get(row)
        ours = {r: t for r, t in accumulators.items() if self._is_caught(r, accumulators)}
        self.caught.restore(ours)
        self._held = self.grads() if accumulators else None
        self._seen = self._sample()

    def _is_caught(self, row: int, sums: Mapping[int, Tensor]) -> bool:
        """Whether a sum of the row does not lie in ``.grad``: all but sparse ones of own dtype."""
        wide, total = row in self.rows.wide, sums.get(row)
        is_sparse = total is not None and total.layout != torch.strided
        return row in self.caught.rows and (wide or not is_sparse)

    def take(self) -> dict[Tensor, Tensor]:
        """The caught sums by parameter, before this accumulator gives way to another."""
        self.caught.settle()
        rows, caught = self.rows, self.caught
        return {rows.params[r]: t for r in caught.rows if (t := caught.sum(r)) is not None}

    def put(self, sums: Mapping[Tensor, Tensor]) -> None:
        """Goes on from the sums that another accumulator gave."""
        held = {r: sums[p] for r, p in enumerate(self.rows.params) if p in sums}
        for row, total in held.items():
            if not self._is_caught(row, held):
                p = self.rows.params[row]
                p.grad = total.to(p.dtype)
        self.caught.restore({r: t for r, t in held.items() if self._is_caught(r, held)})
        if self.norms is not None and held:
            self.norms.load_state_dict(None)  # what they are made of is not known any more

    def forget_caught(self) -> None:
        """Drops the sums that do not lie in ``.grad``, and what is known of their norms."""
        self.caught.clear()
        self._seen = self._sample()
        if self.norms is not None:
            self.norms.clear()

    def clear(self) -> None:
        """Drops every gradient; the next window starts from nothing."""
        for p in self.rows.params:
            p.grad = None
        self._held = None
        self.ride.clear()
        if self.reduction is not None:
            self.reduction.clear()
        self.forget_caught()
        self.slots.zero_()
        self.rows.release_gradients()

    def collect(self) -> WindowGradients:
        """The window's gradients; odd ones are made walkable where that is exact.

        Raises:
            RuntimeError: an accumulator of the window is gone, or a hook took a gradient.
            TypeError: a gradient's layout is neither strided nor sparse COO.
        """
        taken = self.caught.taken if self.ride.taken is None else self.ride.taken
        if taken is not None:
            raise RuntimeError(
                f"ClockedOptimizer: a hook took the gradient of {self._name_of(taken)!r} "
                "during backward; remove the hook, or call discard()"
            )
        self.caught.settle()
        plain = self._gather_plain()
        grads = self.grads() if plain is None else plain
        self._check_held(grads)
        if plain is not None:
            return WindowGradients(grads, self.rows.every_row, ())
        walked: list[int] = []
        odd: list[int] = []
        for row, grad in enumerate(grads):
            if grad is None:
                continue
            if grad is not self.caught.sum(row):
                is_walked = row in self.rows.walked
                grad = make_walkable(self.rows.params[row], grad, is_walked, self._name_of(row))
            grads[row] = grad
            (walked if self._is_walkable(row, grad) else odd).append(row)
        return WindowGradients(grads, tuple(walked), tuple(odd))

    def unmeasured(self, gradients: WindowGradients) -> tuple[int, ...]:
        """Walked rows whose chunk sums are not those of the gradient as it is now."""
        if self.ride.is_empty and not self.caught.rows:
            return gradients.walked
        rest = [row for row in gradients.walked if not self.caught.sums.is_measured(row)]
        grads = gradients.grads
        return tuple(row for row in rest if not self.ride.is_measured(row, grads[row]))

    def _check_held(self, grads: list[Tensor | None]) -> None:
        """Autograd adds in place, so within a window an accumulator stays the object it was."""
        if self._held is None or all(map(is_, self._held, grads)):
            return
        for row, (before, now) in enumerate(zip(self._held, grads, strict=True)):
            if before is now or before is None or now is self.caught.sum(row) is not None:
                continue
            if now is not None and (now.requires_grad or now.is_sparse != before.is_sparse):
                continue  # create_graph=True and sparse + dense make a new sum
            raise RuntimeError(
                f"ClockedOptimizer: the gradient of {self._name_of(row)!r} was "
                f"{'cleared' if now is None else 'replaced'} inside a window of accumulation "
                "(model.zero_grad(), or p.grad = ...); change it in place, or call discard()"
            )

    def _gather_plain(self) -> list[Tensor | None] | None:
        """The common case in one pass: all there, all walkable as they are. None if not so."""
        rows = self.rows
        if not rows.all_walked or not rows.contiguous:
            return None
        if self.caught.rows:
            return self._gather_caught()
        grads = ops.gather_gradients(rows.params, rows.layout(rows.every_row))
        if grads is None or any(grads[row].is_neg() for row in rows.single):
            return None
        return grads  # type: ignore[return-value]

    def _gather_caught(self) -> list[Tensor | None] | None:
        """Every sum, where all are caught and none of them is beside its parameter any more."""
        rows, sums = self.rows, self.caught.sums.all()
        if sums is None:
            return None
        seen = ops.gather_params(rows.params, rows.layout(rows.every_row))
        if not seen and not all(map(rows.fits, rows.every_row)):
            return None
        return sums  # type: ignore[return-value]

    def _is_walkable(self, row: int, grad: Tensor) -> bool:
        """Whether the fast backend may walk the row; where ``p.data`` was replaced, it may not."""
        rows = self.rows
        if row not in rows.walked or grad.layout != torch.strided:
            return False
        if not rows.fits(row):
            rows.is_stale = True
            return False
        return grad.dtype == rows.sum_dtype(row) and grad.shape == rows.params[row].shape
