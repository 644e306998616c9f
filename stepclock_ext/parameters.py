"""The parameters of one wrapper as rows: their groups, and which backend walks them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from . import ops

__all__ = ["ParameterRows", "lies_like", "parameter_names", "register_hook"]


class ParameterRows:
    """A snapshot of the parameters in all groups, in order. Rebuilt when a group changes.

    Attributes:
        params: every parameter, group after group.
        group_rows: rows of each group.
        every_row: all of them.
        single: rows of one element. Only there can a contiguous gradient be a negated view (the
            imaginary part of a conjugate), which keeps the address of what it negates.
        dtypes: of each parameter, as it was when the snapshot was made.
        is_stale: a parameter was found changed (``p.data`` replaced): renew the snapshot.
        walked: rows that the fast backend walks (dense, on its device, of a dtype it knows).
        wide: 16-bit rows whose window sums are fp32.
        has_wide_state: new moments of 16-bit parameters are fp32.
        contiguous: all of `walked` are contiguous, so a gradient need only be so too.
        first_slots: where each row's chunk sums begin. After the chunks of all rows comes one more
            slot a row, for gradients that cannot be cut into chunks (sparse ones).
        num_slots: of the whole window.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        backend: ops.Backend,
        *,
        is_wide: bool = False,
        has_masters: bool = False,
    ) -> None:
        self.params: list[Tensor] = []
        self.group_rows: list[tuple[int, ...]] = []
        for group in groups:
            start = len(self.params)
            self.params.extend(group["params"])
            self.group_rows.append(tuple(range(start, len(self.params))))
        self.backend = backend
        supported = [backend.supports(p) for p in self.params]
        self.walked = frozenset(row for row, yes in enumerate(supported) if yes)
        self.all_walked = all(supported)
        self.contiguous = all(self.params[row].is_contiguous() for row in self.walked)
        self.dtypes = [p.dtype for p in self.params]
        halves = (row for row, dtype in enumerate(self.dtypes) if dtype in ops.HALVES)
        self.is_wide = is_wide
        self.wide = frozenset(halves) if is_wide else frozenset()
        self.has_wide_state = is_wide or has_masters
        self._shapes = [p.shape for p in self.params]
        self._devices = [p.device for p in self.params]
        self._strides = [None if p.is_contiguous() else p.stride() for p in self.params]
        self.is_stale = False
        self.first_slots: list[int] = []
        self.num_slots = 0
        for p in self.params:
            self.first_slots.append(self.num_slots)
            self.num_slots += ops.num_chunks(ops.num_real(p))
        self.first_odd_slot = self.num_slots
        self.num_slots += len(self.params)
        self.every_row = tuple(range(len(self.params)))
        self.single = [row for row, p in enumerate(self.params) if p.numel() == 1]
        self._row_of: dict[int, int] | None = None
        self._layouts: dict[tuple[int, ...], ops.Layout] = {}

    def is_current(self, groups: Iterable[Mapping[str, Any]]) -> bool:
        """Whether the groups still hold these very parameters, as they were."""
        if self.is_stale:
            return False
        lists = [group["params"] for group in groups]
        if [len(params) for params in lists] != [len(rows) for rows in self.group_rows]:
            return False
        return all(map(is_, chain.from_iterable(lists), self.params))

    def of(self, rows: tuple[int, ...]) -> list[Tensor]:
        """The parameters of some rows; for all rows, the very list that gradients come from."""
        if len(rows) == len(self.params):
            return self.params
        return [self.params[row] for row in rows]

    def fits(self, row: int) -> bool:
        """Whether the parameter still has the dtype, shape, strides and device of the snapshot."""
        p, strides = self.params[row], self._strides[row]
        same = p.is_contiguous() if strides is None else p.stride() == strides
        alike = p.dtype == self.dtypes[row] and p.shape == self._shapes[row]
        return same and alike and p.device == self._devices[row]

    def matches(self, row: int, grad: Tensor) -> bool:
        """Whether `grad` lies in memory as the parameter does, in its dtype."""
        p, strides = self.params[row], self._strides[row]
        if grad.layout != torch.strided or grad.dtype != p.dtype or grad.shape != p.shape:
            return False
        if grad.device != p.device:
            return False
        same = grad.is_contiguous() if strides is None else grad.stride() == strides
        return same and not grad.is_conj() and not grad.is_neg()

    def sum_dtype(self, row: int) -> torch.dtype:
        """What the window's sum of a row is made of."""
        return torch.float32 if row in self.wide else self.dtypes[row]

    def state_dtype(self, row: int) -> torch.dtype:
        """What new moments of a row are made of."""
        dtype = self.params[row].dtype
        return torch.float32 if dtype in ops.HALVES and self.has_wide_state else dtype

    def slots_of(self, row: int) -> slice:
        """Where the chunk sums of a row stand."""
        first = self.first_slots[row]
        return slice(first, first + ops.num_chunks(ops.num_real(self.params[row])))

    def row_of(self, p: Tensor) -> int | None:
        """The row of a parameter; None for a tensor that is none."""
        if self._row_of is None:
            self._row_of = {id(param): row for row, param in enumerate(self.params)}
        return self._row_of.get(id(p))

    def layout(self, rows: tuple[int, ...]) -> ops.Layout:
        """The layout of some walked rows; kept, since windows repeat."""
        layout = self._layouts.get(rows)
        if layout is None:
            layout = ops.Layout.of(
                self.backend,
                [self.params[row] for row in rows],
                [self.first_slots[row] for row in rows],
                accumulate_dtype=torch.float32 if self.is_wide else None,
            )
            if len(rows) == 1 or len(self._layouts) < len(self.params) + _MAX_LAYOUTS:
                self._layouts[rows] = layout
        return layout

    def release_gradients(self) -> None:
        """Lets go of the gradients of the last window: their memory is the next backward's."""
        for layout in self._layouts.values():
            layout.release("ACCUMULATOR", "GRAD")

    def odd_slot(self, row: int) -> int:
        """The slot of a gradient that is not cut into chunks."""
        return self.first_odd_slot + row


# Sets of present gradients that alternate (mixture of experts) are few; the bound keeps a model
# whose set is new each window from growing without end.
_MAX_LAYOUTS = 256


def lies_like(total: Tensor, p: Tensor) -> bool:
    """Whether a sum has the shape, strides and device of its parameter."""
    return total.layout == p.layout and (total.shape, total.stride(), total.device) == (
        p.shape,
        p.stride(),
        p.device,
    )


def register_hook(p: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """`hook` is called with `p` whenever a gradient has arrived in ``p.grad``."""
    register: Callable[..., RemovableHandle] = p.register_post_accumulate_grad_hook
    return register(hook)


def parameter_names(
    groups: Sequence[Mapping[str, Any]], model: torch.nn.Module | None
) -> list[str]:
    """A name for each row: the model's, the group's own, or its place."""
    known: dict[int, str] = {}
    if model is not None:
        is_ddp = type(model).__name__ == "DistributedDataParallel"
        bare = model.get_submodule("module") if is_ddp else model
        known = {id(p): name for name, p in bare.named_parameters()}
    names = []
    for g, group in enumerate(groups):
        own = group.get("param_names") or [None] * len(group["params"])
        for i, (p, name) in enumerate(zip(group["params"], own, strict=True)):
            names.append(known.get(id(p)) or name or f"group {g}, parameter {i}")
    return names
