"""The window sums of caught gradients: where they lie, what they are made of, how one is added."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import is_

import torch
from torch import Tensor

from . import ops
from .buckets import Buckets
from .parameters import ParameterRows, lies_like

__all__ = ["WindowSums"]


class WindowSums:
    """Sums of some rows, one window at a time.

    fp32 sums are allocated once and used again in every window; so are those that lie in buckets.
    Any other row's first gradient is its sum: autograd made it for ``.grad``, nobody else has it.

    Args:
        rows: the parameters.
        slots: the window's chunk sums.
        buffers: fp32 sums by parameter, kept from pass to pass.
        buckets: where the sums lie that are reduced over processes; None where they are not.

    Attributes:
        is_last: the micro step that runs is the window's last: chunk sums are wanted.
        grad_slots: gets the chunk sums of each micro gradient; None where they are not wanted.
        prior_slots: gets those of the first ones, where these were not read when they came.
        repeated: a row got two gradients in one micro step.
    """

    def __init__(
        self,
        rows: ParameterRows,
        slots: Tensor,
        buffers: dict[Tensor, Tensor],
        buckets: Buckets | None,
    ) -> None:
        self.is_last = False
        self.grad_slots: Tensor | None = None
        self.prior_slots: Tensor | None = None
        self.repeated = False
        self._rows = rows
        self._slots = slots
        self._buffers = buffers
        self._buckets = buckets
        self._sums: dict[int, Tensor] = {}
        self._has_sparse = False
        self._counts: dict[int, int] = {}
        self._measured: dict[int, int] = {}
        self._complete: list[Tensor] = []

    def of(self, row: int) -> Tensor | None:
        """The row's sum; None where no gradient has come."""
        return self._sums.get(row)

    def all(self) -> list[Tensor] | None:
        """The sums of all rows, if every one is here and dense; the same list while it can be."""
        if self.num_sums < len(self._rows.params) or self._has_sparse:
            return None
        sums = [self._sums[row] for row in self._rows.every_row]
        if len(sums) != len(self._complete) or not all(map(is_, sums, self._complete)):
            self._complete = sums
        return self._complete

    @property
    def num_sums(self) -> int:
        """Rows that have one."""
        return len(self._sums)

    def count(self, row: int) -> int:
        """Gradients that the row's sum is made of, as far as they came one by one."""
        return self._counts.get(row, 0)

    def is_measured(self, row: int) -> bool:
        """Whether the slots hold the chunk sums of the row's sum as it is now."""
        return row in self._sums and self._measured.get(row) == self._sums[row]._version

    def is_kept(self, row: int) -> bool:
        """Whether a first gradient is the sum."""
        return self._buckets is None and row not in self._rows.wide

    def restore(self, sums: Mapping[int, Tensor]) -> None:
        """Makes `sums` those of the open window."""
        for row, total in sums.items():
            if total.layout != torch.strided:
                self._sums[row] = total.to(torch.float32).coalesce()
                self._has_sparse = True
            else:
                p = self._rows.params[row]
                like = torch.empty_like(p) if self.is_kept(row) else self._new_sum(row)
                self._sums[row] = like.detach().copy_(total)
            self._counts[row] = 2  # however many: none of them is known by itself any more

    def clear(self) -> None:
        """A new window."""
        self._sums.clear()
        self._has_sparse = False
        self._counts.clear()
        self._measured.clear()
        self.repeated = False
        if any(map(self.is_kept, self._rows.every_row)):
            self._complete = []

    def adopt(self, rows: Iterable[int]) -> None:
        """What lies in the buckets is the sum of these rows, wherever it came from."""
        assert self._buckets is not None
        for row in rows:
            self._sums[row] = self._buckets.view(row)
            self._counts[row] = 2

    def forget(self, rows: Iterable[int]) -> None:
        """These rows have no gradient in this window."""
        for row in rows:
            self._sums.pop(row, None)

    def add(self, grads: Mapping[int, Tensor]) -> None:
        """Adds a gradient to each of some rows, in as few calls as there are kinds of them."""
        kinds: dict[tuple[bool, bool], list[int]] = {}
        for row in sorted(grads):
            if not self._fits(row, grads[row]):
                self._add_plainly(row, grads[row])
            elif row not in self._sums and self.is_kept(row):
                self._sums[row], self._counts[row] = grads[row], 1
            else:
                store, second = row not in self._sums, self._counts.get(row) == 1
                is_unread = second and row not in self._rows.wide
                kinds.setdefault((store, is_unread), []).append(row)
        for (store, is_unread), among in kinds.items():
            self._add(tuple(among), grads, store=store, second=is_unread)

    def add_sparse(self, row: int, grad: Tensor) -> None:
        """Adds one in fp32, and coalesced: torch does neither for 16 bits."""
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

    def _new_sum(self, row: int) -> Tensor:
        if self._buckets is not None:
            return self._buckets.view(row)
        p = self._rows.params[row]
        buffer = self._buffers.get(p)
        if buffer is None or not lies_like(buffer, p):
            buffer = torch.empty_like(p, dtype=torch.float32, requires_grad=False)
            self._buffers[p] = buffer
        return buffer

    def _fits(self, row: int, grad: Tensor) -> bool:
        """Whether a kernel can add the gradient."""
        total = self._sums.get(row)
        return (
            (total is None or lies_like(total, self._rows.params[row]))
            and row in self._rows.walked
            and self._rows.fits(row)
            and self._rows.matches(row, grad)
        )

    def _add(
        self, among: tuple[int, ...], of_row: Mapping[int, Tensor], *, store: bool, second: bool
    ) -> None:
        if store:
            self._sums.update((row, self._new_sum(row)) for row in among)
        sums = [self._sums[row] for row in among]
        grads = [of_row[row] for row in among]
        layout = self._rows.layout(among)
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

    def _add_plainly(self, row: int, grad: Tensor) -> None:
        """For devices and layouts that the backend does not walk; such a norm is not known."""
        self.repeated = True
        if row in self._sums and self._sums[row].layout != torch.strided:
            self._sums[row] = self._new_sum(row).copy_(self._sums[row].to_dense())
        if row in self._sums:
            self._sums[row] += grad
        elif not self.is_kept(row):
            self._sums[row] = self._new_sum(row).copy_(grad)
        else:
            p = self._rows.params[row]
            self._sums[row] = torch.empty_like(p, requires_grad=False).copy_(grad)
        self._counts[row] = self._counts.get(row, 0) + 1
