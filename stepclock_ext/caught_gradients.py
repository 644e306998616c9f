"""Gradients taken out of ``.grad`` as they arrive, and added to window sums of our own.

So are 16-bit gradients that are summed in fp32, and every gradient whose norm is wanted by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from operator import is_

import torch
from torch import Tensor

from . import ops
from .gradient_hook import GradientHook, has_hook, remove_hooks
from .parameters import ParameterRows, lies_like, register_hook

__all__ = ["CaughtGradients"]

# Small gradients wait until they are worth a call; 64 Ki of bf16 are 128 KiB in flight.
_FLUSH_ELEMENTS = 65536


class CaughtGradients:
    """The window sums of some rows, fed by a hook on each parameter::

        a gradient arrives:   out of .grad, and waits with others until they are worth a call
        the row's first:      the sum is stored (in fp32) or is the gradient itself (own dtype)
        any other:            added; the last micro step's pass also writes the chunk sums

    fp32 sums are allocated once and used again in every window.

    Args:
        rows: the parameters.
        caught: rows to catch.
        slots: the window's chunk sums.
        buffers: fp32 sums by parameter, kept from pass to pass.

    Attributes:
        rows: those that are caught.
        is_last: the micro step that runs is the window's last: chunk sums are wanted.
        grad_slots: gets the chunk sums of each micro gradient; None where they are not wanted.
        prior_slots: gets those of the first ones, where these were not read when they came.
        arrivals: gradients caught so far; it only grows.
        taken: a row whose gradient somebody's hook took before ours saw it.
        repeated: a row got two gradients in one micro step.
    """

    def __init__(
        self,
        rows: ParameterRows,
        caught: Iterable[int],
        slots: Tensor,
        buffers: dict[Tensor, Tensor],
    ) -> None:
        self.rows = frozenset(caught)
        self.is_last = False
        self.grad_slots: Tensor | None = None
        self.prior_slots: Tensor | None = None
        self.arrivals = 0
        self.taken: int | None = None
        self.repeated = False
        self._all = rows
        self._slots = slots
        self._buffers = buffers
        self._sums: dict[int, Tensor] = {}
        self._has_sparse = False
        self._counts: dict[int, int] = {}
        self._measured: dict[int, int] = {}
        self._in_micro_step: set[int] = set()
        self._waiting: dict[int, Tensor] = {}
        self._waiting_elements = 0
        self._stream: torch.cuda.Stream | None = None  # of what waits
        self._complete: list[Tensor] = []
        self._lock = threading.Lock()  # a backward over several devices calls hooks from each
        self.watch()

    def watch(self) -> None:
        """Puts our hooks on the parameters, and takes off those of a wrapper before us."""
        for row, p in enumerate(self._all.params):
            if row in self.rows:
                self._watch(row)
            elif p._post_accumulate_grad_hooks:
                remove_hooks(p, None)

    def is_watching(self) -> bool:
        """Whether the first row's hook is still ours: another wrapper may have come since."""
        for row in self.rows:
            return has_hook(self._all.params[row], self)
        return True

    def sum(self, row: int) -> Tensor | None:
        """The row's window sum; None where no gradient has come."""
        return self._sums.get(row)

    def all_sums(self) -> list[Tensor] | None:
        """The sums of all rows, if every one is here and dense; the same list while it can be."""
        if len(self._sums) < len(self._all.params) or self._has_sparse:
            return None
        sums = [self._sums[row] for row in self._all.every_row]
        if len(sums) != len(self._complete) or not all(map(is_, sums, self._complete)):
            self._complete = sums
        return self._complete

    def settle(self) -> None:
        """Adds what waits, and gradients that came without a hook (``p.grad = ...``, say)."""
        for row in self.rows:
            p = self._all.params[row]
            if p.grad is not None:
                self._watch(row)
                self.catch(row)
        with self._lock:
            if self._stream is not None:  # autograd has joined the streams of its gradients
                for grad in self._waiting.values():
                    grad.record_stream(torch.cuda.current_stream(grad.device))
            self._flush()

    def end_micro_step(self) -> set[int]:
        """Rows that got a gradient in the micro step that ends here."""
        arrived, self._in_micro_step = self._in_micro_step, set()
        return arrived

    def count(self, row: int) -> int:
        """Gradients that the row's sum is made of, as far as they came one by one."""
        return self._counts.get(row, 0)

    def is_measured(self, row: int) -> bool:
        """Whether the slots hold the chunk sums of the row's sum as it is now."""
        return row in self._sums and self._measured.get(row) == self._sums[row]._version

    def restore(self, sums: dict[int, Tensor]) -> None:
        """Makes `sums` those of the open window."""
        self.clear()
        for row in self.rows & sums.keys():
            if sums[row].layout != torch.strided:
                self._sums[row] = sums[row].to(torch.float32).coalesce()
                self._has_sparse = True
            else:
                p = self._all.params[row]
                like = self._new_sum(row) if self._is_wide(row) else torch.empty_like(p)
                self._sums[row] = like.detach().copy_(sums[row])
            self._counts[row] = 2  # however many: none of them is known by itself any more

    def clear(self) -> None:
        """A new window. fp32 sums stay allocated."""
        self._sums.clear()
        self._has_sparse = False
        self._counts.clear()
        self._measured.clear()
        self._in_micro_step.clear()
        self._waiting.clear()
        self._waiting_elements = 0
        self.taken = None
        self.repeated = False
        if not all(map(self._is_wide, self.rows)):
            self._complete = []

    def _watch(self, row: int) -> None:
        p = self._all.params[row]
        if remove_hooks(p, self):
            return
        # A frozen parameter takes no hook, and may be thawed later.
        frozen = not p.requires_grad
        if frozen:
            p.requires_grad_(True)
        try:
            register_hook(p, GradientHook(self, row))
        finally:
            if frozen:
                p.requires_grad_(False)

    def _is_wide(self, row: int) -> bool:
        return row in self._all.wide

    def _new_sum(self, row: int) -> Tensor:
        p = self._all.params[row]
        buffer = self._buffers.get(p)
        if buffer is None or not lies_like(buffer, p):
            buffer = torch.empty_like(p, dtype=torch.float32, requires_grad=False)
            self._buffers[p] = buffer
        return buffer

    def catch(self, row: int) -> None:
        """Takes the row's gradient out of ``.grad``; what the hooks call."""
        p = self._all.params[row]
        grad = p.grad
        if grad is None:
            self.taken = row
            return
        if grad.layout != torch.strided:
            if not self._is_wide(row):
                return  # autograd adds sparse ones exactly, and plain PyTorch works on them
            with self._lock:
                self._flush()
                self._add_sparse(row, grad.detach())
            return
        with self._lock:
            self._keep_streams_apart(p)
            if row in self._waiting:
                self._flush()
            p.grad = None
            self.repeated |= row in self._in_micro_step
            self._in_micro_step.add(row)
            self.arrivals += 1
            self._waiting[row] = grad.detach()
            self._waiting_elements += grad.numel()
            if self._waiting_elements >= _FLUSH_ELEMENTS:
                self._flush()

    def _keep_streams_apart(self, p: Tensor) -> None:
        """Gradients that wait are added on the stream that made them."""
        stream = torch.cuda.current_stream(p.device) if p.is_cuda else None
        if self._waiting and self._stream is not None and stream != self._stream:
            with torch.cuda.stream(self._stream):
                self._flush()
        self._stream = stream

    def _flush(self) -> None:
        """Adds all that waits, in as few calls as there are kinds of it."""
        kinds: dict[tuple[bool, bool], list[int]] = {}
        for row in sorted(self._waiting):
            if not self._fits(row):
                self._add_plainly(row, self._waiting[row])
            elif row not in self._sums and not self._is_wide(row):
                self._keep(row, self._waiting[row])
            else:
                store, second = row not in self._sums, self._counts.get(row) == 1
                kinds.setdefault((store, second and not self._is_wide(row)), []).append(row)
        for (store, second), among in kinds.items():
            self._add(tuple(among), store=store, second=second)
        self._waiting.clear()
        self._waiting_elements = 0

    def _fits(self, row: int) -> bool:
        """Whether a kernel can add the gradient that waits."""
        total = self._sums.get(row)
        return (
            (total is None or lies_like(total, self._all.params[row]))
            and row in self._all.walked
            and self._all.fits(row)
            and self._all.matches(row, self._waiting[row])
        )

    def _keep(self, row: int, grad: Tensor) -> None:
        """The first gradient is the sum: autograd made it for ``.grad``, nobody else has it."""
        self._sums[row] = grad
        self._counts[row] = 1

    def _add(self, among: tuple[int, ...], *, store: bool, second: bool) -> None:
        if store:
            self._sums.update((row, self._new_sum(row)) for row in among)
        sums = [self._sums[row] for row in among]
        grads = [self._waiting[row] for row in among]
        layout = self._all.layout(among)
        layout.verified.update(ACCUMULATOR=sums, GRAD=grads)  # ours, and looked at by _fits()
        ops.accumulate_(
            sums,
            grads,
            layout,
            slots=self._slots if self.is_last else None,
            grad_slots=self.grad_slots,
            prior_slots=self.prior_slots if second else None,
            store=store,
        )
        layout.release("ACCUMULATOR", "GRAD")
        torch.autograd.graph.increment_version(sums)
        for row, total in zip(among, sums, strict=True):
            self._counts[row] = self._counts.get(row, 0) + 1
            if self.is_last:
                self._measured[row] = total._version

    def _add_sparse(self, row: int, grad: Tensor) -> None:
        """In fp32, and coalesced: torch does neither for 16 bits."""
        self._all.params[row].grad = None
        self.arrivals += 1
        self.repeated = True
        wide, total = grad.to(torch.float32).coalesce(), self._sums.get(row)
        self._has_sparse = True
        if total is None:
            self._sums[row] = wide
        elif total.layout == torch.strided:
            total += wide
        else:
            self._sums[row] = (total + wide).coalesce()
        self._counts[row] = self._counts.get(row, 0) + 1

    def _add_plainly(self, row: int, grad: Tensor) -> None:
        """For devices and layouts that the backend does not walk; such a norm is not known."""
        self.repeated = True
        if row in self._sums and self._sums[row].layout != torch.strided:
            self._sums[row] = self._new_sum(row).copy_(self._sums[row].to_dense())
        if row in self._sums:
            self._sums[row] += grad
        elif self._is_wide(row):
            self._sums[row] = self._new_sum(row).copy_(grad)
        else:
            p = self._all.params[row]
            self._sums[row] = torch.empty_like(p, requires_grad=False).copy_(grad)
        self._counts[row] = self._counts.get(row, 0) + 1
