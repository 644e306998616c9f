"""Gradients taken out of ``.grad`` as they arrive, and added to window sums of our own.

So are 16-bit gradients that are summed in fp32, every gradient whose norm is wanted by itself, and
all those whose sums we reduce over processes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch
from torch import Tensor

from .bucket_reduction import BucketReduction
from .gradient_hook import GradientHook, has_hook, remove_hooks
from .parameters import ParameterRows, register_hook
from .window_sums import WindowSums

__all__ = ["CaughtGradients"]

# Small gradients wait until they are worth a call; 64 Ki of bf16 are 128 KiB in flight.
_FLUSH_ELEMENTS = 65536


class CaughtGradients:
    """The window sums of some rows, fed by a hook on each parameter::

        a gradient arrives:   out of .grad, and waits with others until they are worth a call
        the row's first:      the sum is stored (fp32, buckets) or is the gradient itself
        any other:            added; the last micro step's pass also writes the chunk sums

    A sum in the gradients' own dtype that goes into a bucket can wait for that: until the window's
    last micro step autograd adds in ``.grad``, as it does without us.

    Args:
        rows: the parameters.
        caught: rows to catch.
        slots: the window's chunk sums.
        buffers: fp32 sums by parameter, kept from pass to pass.
        reduction: hands the sums to other processes; they lie in its buckets.
        late: rows whose gradients may stay in ``.grad`` until the last micro step.

    Attributes:
        rows: those that are caught.
        is_last: the micro step that runs is the window's last.
        sums: of the open window.
        reduction: as given.
        params: one a row.
        order: rows as their gradients first arrived.
        arrivals: gradients caught so far; it only grows.
        taken: a row whose gradient somebody's hook took before ours saw it.
        is_disturbed: another wrapper has taken one of our hooks off.
    """

    def __init__(
        self,
        rows: ParameterRows,
        caught: Iterable[int],
        slots: Tensor,
        buffers: dict[Tensor, Tensor],
        reduction: BucketReduction | None = None,
        late: Iterable[int] = (),
    ) -> None:
        self.rows = frozenset(caught)
        self.is_last = False
        self._late = frozenset(late)
        self.sums = WindowSums(
            rows, slots, buffers, None if reduction is None else reduction.buckets
        )
        self.reduction = reduction
        self.params = rows.params
        self.order: dict[int, None] = {}
        self.arrivals = 0
        self.taken: int | None = None
        self.is_disturbed = False
        self._all = rows
        self._in_micro_step: set[int] = set()
        self._waiting: dict[int, Tensor] = {}
        self._waiting_elements = 0
        self._stream: torch.cuda.Stream | None = None  # of what waits
        self._lock = threading.RLock()  # a backward over several devices calls hooks from each
        if reduction is not None:
            reduction.bind(self)
        self.watch()

    def watch(self) -> None:
        """Puts our hooks on the parameters, and takes off those of a wrapper before us."""
        self.is_disturbed = False
        for row, p in enumerate(self._all.params):
            if row in self.rows:
                self._watch(row)
            elif p._post_accumulate_grad_hooks:
                remove_hooks(p, None)

    def is_watching(self) -> bool:
        """Whether our hooks are where they were: another wrapper may have come since."""
        if self.is_disturbed:
            return False
        for row in self.rows:
            return has_hook(self._all.params[row], self)
        return True

    def sum(self, row: int) -> Tensor | None:
        """The row's window sum; None where no gradient has come."""
        return self.sums.of(row)

    def settle(self, *, all_rows: bool = False) -> None:
        """Adds what waits, and gradients that came without a hook (``p.grad = ...``, say).

        Args:
            all_rows: also of those whose turn is in the window's last micro step.
        """
        for row in self.rows:
            p = self._all.params[row]
            if p.grad is not None and (all_rows or self._is_due(row)):
                self._watch(row)
                self._take(row)
        with self._lock:
            if self._stream is not None:  # autograd has joined the streams of its gradients
                for grad in self._waiting.values():
                    grad.record_stream(torch.cuda.current_stream(grad.device))
            self.flush()

    def end_micro_step(self) -> set[int]:
        """Rows that got a gradient in the micro step that ends here."""
        arrived, self._in_micro_step = self._in_micro_step, set()
        return arrived

    def restore(self, sums: dict[int, Tensor]) -> None:
        """Makes `sums` those of the open window."""
        self.clear()
        self.sums.restore({row: sums[row] for row in self.rows & sums.keys()})

    def clear(self) -> None:
        """A new window. fp32 sums stay allocated."""
        self.sums.clear()
        self._in_micro_step.clear()
        self._waiting.clear()
        self._waiting_elements = 0
        self.taken = None

    def catch(self, row: int) -> None:
        """A gradient has arrived in ``.grad``; what the hooks call."""
        self.order[row] = None
        if self._is_due(row):
            self._take(row)

    def _is_due(self, row: int) -> bool:
        """Whether a gradient of the row is taken now, and not in the last micro step."""
        return self.is_last or row not in self._late or self.sums.of(row) is not None

    def take_rest(self, rows: Iterable[int]) -> None:
        """Adds what lies in ``.grad`` of these rows."""
        for row in rows:
            if self._all.params[row].grad is not None:
                self._take(row)
        self.flush()

    def _take(self, row: int) -> None:
        """Takes the row's gradient out of ``.grad``."""
        p = self._all.params[row]
        grad = p.grad
        if grad is None:
            self.taken = row
            return
        if grad.layout != torch.strided:
            self._catch_sparse(row, grad.detach())
            return
        with self._lock:
            self._keep_streams_apart(p)
            p.grad = None
            self.sums.repeated |= row in self._in_micro_step
            self._in_micro_step.add(row)
            self.arrivals += 1
            if self.reduction is None or not self.reduction.takes(row, grad.detach()):
                self.add(row, grad.detach())

    def add(self, row: int, grad: Tensor) -> None:
        """Adds a gradient to the row's sum, at once or with others."""
        if row in self._waiting:
            self.flush()
        self._waiting[row] = grad
        self._waiting_elements += grad.numel()
        if self._waiting_elements >= _FLUSH_ELEMENTS:
            self.flush()
        if self.reduction is not None:
            self.reduction.arrive(row)

    def flush(self) -> None:
        """Adds all that waits."""
        self.sums.add(self._waiting)
        self._waiting.clear()
        self._waiting_elements = 0

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

    def _catch_sparse(self, row: int, grad: Tensor) -> None:
        p = self._all.params[row]
        if self.reduction is not None:
            raise RuntimeError(
                "ClockedOptimizer: gradients must be dense with process_group=, got a sparse one "
                f"of shape {tuple(p.shape)}; build its Embedding with sparse=False"
            )
        if row not in self._all.wide:
            return  # autograd adds sparse ones exactly, and plain PyTorch works on them
        with self._lock:
            self.flush()
            p.grad = None
            self.arrivals += 1
            self.sums.add_sparse(row, grad)

    def _keep_streams_apart(self, p: Tensor) -> None:
        """Gradients that wait are added on the stream that made them."""
        stream = torch.cuda.current_stream(p.device) if p.is_cuda else None
        if self._waiting and self._stream is not None and stream != self._stream:
            with torch.cuda.stream(self._stream):
                self.flush()
        self._stream = stream
