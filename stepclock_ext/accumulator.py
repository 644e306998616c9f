"""Where a micro gradient goes: a parameter's own ``.grad``, watched over a whole window.

Autograd keeps the first gradient of a window and adds the others in place. In the last micro step
of a window the accumulators of large parameters are set aside, so that autograd hands each gradient
over alone; a hook adds it and writes its chunk sums in the same pass (the norm rides along).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from . import ops
from .parameters import ParameterRows

__all__ = ["Accumulator", "WindowGradients"]

# A hook costs some 10 microseconds of Python. From here on it saves more than that: 64 Ki fp32
# elements are 256 KiB, which one read pass fetches in about 10 microseconds at 25 GB/s.
RIDE_MIN_ELEMENTS = 65536


@dataclass(frozen=True, eq=False)
class WindowGradients:
    """The gradients at the end of a window, in a state that ops can walk.

    Attributes:
        grads: one a row; None where the parameter took no part.
        walked: rows for the fast backend.
        odd: rows for the reference (sparse gradients, other devices or dtypes).
    """

    grads: list[Tensor | None]
    walked: tuple[int, ...]
    odd: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        """No parameter holds a gradient."""
        return not self.walked and not self.odd

    @property
    def is_complete(self) -> bool:
        """Every parameter holds a gradient."""
        return len(self.walked) + len(self.odd) == len(self.grads)

    def of(self, rows: tuple[int, ...]) -> list[Tensor]:
        """The gradients of `rows`, all of which are present."""
        if len(rows) == len(self.grads):
            return self.grads  # type: ignore[return-value]
        return [grad for row in rows if (grad := self.grads[row]) is not None]


class Accumulator:
    """The window sums of one wrapper's parameters.

    Attributes:
        rows: the parameters.
        slots: the chunk sums of this window, fp64; zero between windows.
    """

    def __init__(self, rows: ParameterRows, name_of: Callable[[int], str]) -> None:
        self.rows = rows
        self.slots = ops.make_slots(rows.num_slots)
        self._name_of = name_of
        self._held: list[Tensor | None] | None = None
        self._seen: list[tuple[int, int]] = []
        self._taken: int | None = None
        self._ridden: dict[int, tuple[Tensor, int]] = {}

    def grads(self) -> list[Tensor | None]:
        """Each parameter's ``.grad`` as it is."""
        return [p.grad for p in self.rows.params]

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

        Of more than 64 parameters an even sample of 64 is watched.
        """
        return self._sample() != self._seen

    def _sample(self) -> list[tuple[int, int]]:
        """Identity and version of some gradients: a backward changes one or the other."""
        step = -(-len(self.rows.params) // 64)
        grads = (p.grad for p in self.rows.params[::step])
        return [(id(grad), grad._version) for grad in grads if grad is not None]

    def held(self) -> dict[int, Tensor]:
        """The accumulators of the open window by row."""
        return {row: grad for row, grad in enumerate(self._held or ()) if grad is not None}

    def restore(self, accumulators: dict[int, Tensor]) -> None:
        """Makes `accumulators` the open window's, as `held` gave them."""
        for row, p in enumerate(self.rows.params):
            p.grad = accumulators.get(row)
        self._held = self.grads() if accumulators else None
        self._seen = self._sample()

    def clear(self) -> None:
        """Drops every gradient; the next window starts from nothing."""
        for p in self.rows.params:
            p.grad = None
        self._held = None
        self._seen = []
        self._taken = None
        if self._ridden:
            self._ridden.clear()
        self.slots.zero_()
        self.rows.release_gradients()

    @contextmanager
    def riding(self) -> Iterator[None]:
        """Around the last backward of a window: its chunk sums are written as gradients arrive."""
        rideable = ((row, self._set_aside(row)) for row in self._rideable())
        set_aside = {row: grad for row, grad in rideable if grad is not None}
        handles = [
            self._register(self.rows.params[row], self._hook(row, grad))
            for row, grad in set_aside.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for row, grad in set_aside.items():
                p = self.rows.params[row]
                if p.grad is None and self._taken != row:  # not part of this micro step
                    p.grad = grad

    def collect(self) -> WindowGradients:
        """The window's gradients; odd ones are made walkable where that is exact.

        Raises:
            RuntimeError: an accumulator of the window is gone, or a hook took a gradient.
            TypeError: a gradient's layout is neither strided nor sparse COO.
        """
        if self._taken is not None:
            raise RuntimeError(
                f"ClockedOptimizer: a hook took the gradient of {self._name_of(self._taken)!r} "
                "during backward; remove the hook, or call discard()"
            )
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
            grads[row] = grad = self._walkable(row, grad)
            fits = row in self.rows.walked and grad.layout == torch.strided
            (walked if fits and grad.dtype == self.rows.dtypes[row] else odd).append(row)
        return WindowGradients(grads, tuple(walked), tuple(odd))

    def unmeasured(self, gradients: WindowGradients) -> tuple[int, ...]:
        """Walked rows whose chunk sums are not those of the gradient as it is now."""
        if not self._ridden:
            return gradients.walked
        grads = gradients.grads
        return tuple(row for row in gradients.walked if not self._is_measured(row, grads[row]))

    def _is_measured(self, row: int, grad: Tensor | None) -> bool:
        accumulator, version = self._ridden.get(row, (None, 0))
        return grad is not None and grad is accumulator and grad._version == version

    def _check_held(self, grads: list[Tensor | None]) -> None:
        """Autograd adds in place, so within a window an accumulator stays the object it was."""
        if self._held is None:
            return
        for row, (before, now) in enumerate(zip(self._held, grads, strict=True)):
            if before is now or before is None:
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
        return ops.gather_gradients(rows.params, rows.layout(rows.every_row))  # type: ignore[return-value]

    def _walkable(self, row: int, grad: Tensor) -> Tensor:
        """`grad`, or its values in the parameter's memory layout, stored back as ``.grad``."""
        p = self.rows.params[row]
        if grad.layout == torch.sparse_coo:
            if not grad.is_coalesced():
                p.grad = grad = grad.coalesce()
            return grad
        if grad.layout != torch.strided:
            raise TypeError(
                f"ClockedOptimizer: the gradient of {self._name_of(row)!r} must be strided or "
                f"sparse COO, got {grad.layout}; convert it with p.grad = p.grad.to_dense()"
            )
        same = grad.is_contiguous() if p.is_contiguous() else grad.stride() == p.stride()
        if row not in self.rows.walked or (same and not grad.is_conj()):
            return grad
        packed = torch.empty_like(p, dtype=grad.dtype, memory_format=torch.preserve_format)
        packed = packed.detach().copy_(grad)
        p.grad = packed
        return packed

    def _rideable(self) -> list[int]:
        """Rows whose accumulator may be set aside: large, dense, and nobody else's business."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return []  # a reducer works on .grad itself
        sizes = self.rows.params
        return [row for row in self.rows.walked if sizes[row].numel() >= RIDE_MIN_ELEMENTS]

    def _set_aside(self, row: int) -> Tensor | None:
        p = self.rows.params[row]
        grad = p.grad
        if grad is None or grad.requires_grad or not _fits(grad, p):
            return None
        if p._post_accumulate_grad_hooks:  # somebody's hook, which expects the sum so far
            return None
        p.grad = None
        return grad

    def _register(self, p: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
        register: Callable[..., RemovableHandle] = p.register_post_accumulate_grad_hook
        return register(hook)

    def _hook(self, row: int, accumulator: Tensor) -> Callable[[Tensor], None]:
        def merge(p: Tensor) -> None:
            fresh = p.grad
            if fresh is accumulator:  # a second visit in one backward: autograd added in place
                self._ridden.pop(row, None)
                return
            if fresh is None:
                self._taken = row
                return
            if fresh.requires_grad or not _fits(fresh, p):
                p.grad = accumulator + fresh.to(accumulator.dtype)
                return
            layout = self.rows.layout((row,))
            ops.accumulate_([accumulator], [fresh], layout, slots=self.slots)
            layout.release("ACCUMULATOR", "GRAD")
            torch.autograd.graph.increment_version(accumulator)
            p.grad = accumulator
            self._ridden[row] = (accumulator, accumulator._version)

        return merge


def _fits(grad: Tensor, p: Tensor) -> bool:
    """Whether `grad` lies in memory as `p` does."""
    if grad.layout != torch.strided or grad.dtype != p.dtype or grad.is_conj():
        return False
    return grad.is_contiguous() if p.is_contiguous() else grad.stride() == p.stride()
