"""The norm's free ride: chunk sums written by the last accumulation of a window.

In the last micro step the accumulators of large parameters are set aside, so that autograd hands
each gradient over alone; a hook adds it and writes its chunk sums in the same pass. A gradient that
is changed afterwards is measured again, if its version counter moved (``p.grad.data`` hides changes
from it, as it does from autograd).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from . import ops
from .parameters import ParameterRows

__all__ = ["RIDE_MIN_ELEMENTS", "NormRide"]

# A hook costs some 10 microseconds of Python. From here on it saves more than that: 64 Ki fp32
# elements are 256 KiB, which one read pass fetches in about 10 microseconds at 25 GB/s.
RIDE_MIN_ELEMENTS = 65536


class NormRide:
    """Which rows of this window have their chunk sums already.

    Attributes:
        taken: a row whose gradient somebody's hook took before ours saw it.
    """

    def __init__(self, rows: ParameterRows, slots: Tensor) -> None:
        self._rows = rows
        self._slots = slots
        self._measured: dict[int, tuple[Tensor, int]] = {}
        self.taken: int | None = None

    @contextmanager
    def riding(self) -> Iterator[None]:
        """Around the last backward of a window: its chunk sums are written as gradients arrive."""
        offered = ((row, self._set_aside(row)) for row in self._rideable())
        set_aside = {row: grad for row, grad in offered if grad is not None}
        handles = [
            _register(self._rows.params[row], self.hook(row, grad))
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
            elif not _fits(fresh, p):
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
        params = self._rows.params
        return [row for row in self._rows.walked if params[row].numel() >= RIDE_MIN_ELEMENTS]

    def _set_aside(self, row: int) -> Tensor | None:
        """The row's accumulator, taken out of ``.grad``; None where it must stay."""
        p = self._rows.params[row]
        grad = p.grad
        if grad is None or grad.requires_grad or not self._rows.fits(row) or not _fits(grad, p):
            return None
        if p._post_accumulate_grad_hooks:  # somebody's hook, which expects the sum so far
            return None
        p.grad = None
        return grad


def _register(p: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    register: Callable[..., RemovableHandle] = p.register_post_accumulate_grad_hook
    return register(hook)


def _fits(grad: Tensor, p: Tensor) -> bool:
    """Whether `grad` lies in memory as `p` does."""
    if grad.layout != torch.strided or grad.dtype != p.dtype or grad.is_conj() or grad.is_neg():
        return False
    return grad.is_contiguous() if p.is_contiguous() else grad.stride() == p.stride()
