"""The norm's free ride: chunk sums written by the last accumulation of a window.

In the last micro step the accumulators of large parameters are set aside, so that autograd hands
each gradient over alone; a hook adds it and writes its chunk sums in the same pass. A gradient that
is changed afterwards is measured again, if its version counter moved (``p.grad.data`` hides changes
from it, as it does from autograd).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager

import torch
from torch import Tensor

from . import ops
from .parameters import ParameterRows, register_hook

__all__ = ["RIDE_MIN_ELEMENTS", "NormRide"]

# A hook costs some 10 microseconds of Python. From here on it saves more than that: 64 Ki fp32
# elements are 256 KiB, which one read pass fetches in about 10 microseconds at 25 GB/s.
RIDE_MIN_ELEMENTS = 65536


class NormRide:
    """Which rows of this window have their chunk sums already.

    Args:
        rows: the parameters.
        slots: of the window.
        caught: rows whose gradients are taken out of ``.grad`` and need no ride.

    Attributes:
        taken: a row whose gradient somebody's hook took before ours saw it.
    """

    def __init__(self, rows: ParameterRows, slots: Tensor, caught: Set[int] = frozenset()) -> None:
        self._rows = rows
        self._caught = caught
        self._slots = slots
        self._measured: dict[int, tuple[Tensor, int]] = {}
        self.taken: int | None = None

    @contextmanager
    def riding(self) -> Iterator[None]:
        """Around the last backward of a window: its chunk sums are written as gradients arrive."""
        offered = ((row, self._set_aside(row)) for row in self._rideable())
        set_aside = {row: grad for row, grad in offered if grad is not None}
        handles = [
            register_hook(self._rows.params[row], self.hook(row, grad))
            for row, grad in set_aside.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for row, grad in set_aside.items():
                p = self._rows.params[row]
                if p.grad is None and self.taken != row:  # not part of this micro step
                    p.grad = grad

    def hook(self, row: int, accumulator: Tensor) -> Callable[[Tensor], None]:
        """What autograd calls when the gradient of `row` has arrived in ``.grad``."""

        def merge(p: Tensor) -> None:
            fresh = p.grad
            if fresh is accumulator:  # a second visit in one backward: autograd added in place
                self._measured.pop(row, None)
            elif fresh is None:
                self.taken = row
            elif fresh.requires_grad:  # create_graph=True: the sum belongs to a graph
                p.grad = accumulator + fresh
            elif not self._rows.matches(row, fresh):
                p.grad = accumulator.add_(fresh)
            else:
                layout = self._rows.layout((row,))
                ops.accumulate_([accumulator], [fresh], layout, slots=self._slots)
                layout.release("ACCUMULATOR", "GRAD")
                torch.autograd.graph.increment_version(accumulator)
                p.grad = accumulator
                self._measured[row] = (accumulator, accumulator._version)

        return merge

    def is_measured(self, row: int, grad: Tensor | None) -> bool:
        """Whether the slots hold the sums of `grad` as it is now."""
        accumulator, version = self._measured.get(row, (None, 0))
        return grad is not None and grad is accumulator and grad._version == version

    @property
    def is_empty(self) -> bool:
        """Nothing rode in this window."""
        return not self._measured

    def clear(self) -> None:
        """A new window: nothing has been measured."""
        self._measured.clear()
        self.taken = None

    def _rideable(self) -> list[int]:
        """Large rows, where a hook costs less than it saves."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return []  # a reducer works on .grad itself
        params, own = self._rows.params, self._rows.walked - self._caught
        return [row for row in own if params[row].numel() >= RIDE_MIN_ELEMENTS]

    def _set_aside(self, row: int) -> Tensor | None:
        """The row's accumulator, taken out of ``.grad``; None where it must stay."""
        p = self._rows.params[row]
        grad = p.grad
        if grad is None or grad.requires_grad or not self._rows.fits(row):
            return None
        if not self._rows.matches(row, grad):
            return None
        if p._post_accumulate_grad_hooks:  # somebody's hook, which expects the sum so far
            return None
        p.grad = None
        return grad
