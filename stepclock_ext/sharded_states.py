"""ZeRO-1: each process updates its share of the parameters, with its share of the states.

A share is an equal slice of each bucket, wherever it cuts parameters. The slices of parameters that
lie in this process's shares are parameters themselves, of optimizers like the inner ones: all that
moves a parameter moves a slice. Rajbhandari et al. 2020.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import ops
from .bucket_reduction import BucketReduction
from .collectives import all_gather_single
from .parameters import ParameterRows
from .part_optimizers import copy_options, like_group, make_like
from .update_rules import RULES
from .window_gradients import WindowGradients

__all__ = ["ShardedStates", "refuse_unsharded"]


def refuse_unsharded(optimizers: Sequence[Optimizer]) -> None:
    """Refuses optimizers that may look at more than one element at a time.

    Raises:
        ValueError: one of them is no AdamW, Adam or SGD.
    """
    for inner in optimizers:
        if type(inner) not in RULES:
            names = ", ".join(sorted(rule.__name__ for rule in RULES))
            raise ValueError(
                f"ClockedOptimizer: shard_states=True must go with {names}, got "
                f"{type(inner).__name__}; use one of these, or leave it out"
            )


class ShardedStates:
    """The shares of this process.

    Args:
        inners: whose groups and options hold.
        rows: their parameters.
        reduction: reduce-scatters the sums of these rows.

    Raises:
        ValueError: a parameter has holes in its memory.

    Attributes:
        optimizers: like `inners`, of the slices; they keep the states.
        slices: one a row; empty where this process owns nothing of it.
    """

    def __init__(
        self, inners: Sequence[Optimizer], rows: ParameterRows, reduction: BucketReduction
    ) -> None:
        for p in rows.params:
            if p.stride() != torch.empty_like(p, device="meta").stride():
                raise ValueError(
                    "ClockedOptimizer: shard_states=True must go with parameters without holes in "
                    f"their memory, got shape {tuple(p.shape)} with strides {p.stride()}; make it "
                    "contiguous"
                )
        self._inners = list(inners)
        self._rows = rows
        self._reduction = reduction
        self._bounds = [self._find_bounds(row) for row in rows.every_row]
        self.slices = [self._slice(row) for row in rows.every_row]
        of_row = iter(self.slices)
        self.optimizers = [
            make_like(inner, [_like(group, of_row) for group in inner.param_groups])
            for inner in inners
        ]

    def has_states(self) -> bool:
        """Whether an optimizer has begun, or has loaded what another had."""
        return any(own.state for own in self.optimizers)

    def follow(self) -> None:
        """Takes over what schedulers and users have set in the groups.

        Raises:
            RuntimeError: an inner optimizer has step hooks, which want whole parameters; or a
                parameter is of another kind than it was.
        """
        self._follow_memory()
        for inner, own in zip(self._inners, self.optimizers, strict=True):
            if inner._optimizer_step_pre_hooks or inner._optimizer_step_post_hooks:
                raise RuntimeError(
                    "ClockedOptimizer: shard_states=True must go without step hooks, got some on "
                    f"{type(inner).__name__}; remove them, or leave shard_states out"
                )
            copy_options(inner, own)

    def sums(self, present: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The reduced sums of the slices, where `present` has one of the whole row."""
        found: list[Tensor | None] = []
        for row, total in enumerate(present):
            slot, (start, end) = self._reduction.buckets.slots[row], self._bounds[row]
            share = self._share(slot.bucket)
            first = slot.offset + start - share.start
            part = self._reduction.shares[slot.bucket][first : first + end - start]
            if start == end:
                part = part[:0]
            if self._rows.dtypes[row].is_complex:
                part = torch.view_as_complex(part.view(-1, 2))
            found.append(None if total is None else part)
        return found

    def cut_gradients(self, gradients: WindowGradients, slices: ParameterRows) -> WindowGradients:
        """The reduced sums of the slices, as ops walk them.

        Args:
            gradients: of the whole rows; says which are there.
            slices: the rows of the slices.
        """
        sums = self.sums(gradients.grads)
        there = [row for row, total in enumerate(sums) if total is not None]
        walked = tuple(row for row in there if row in slices.walked)
        odd = tuple(row for row in there if row not in slices.walked)
        return WindowGradients(sums, walked, odd)

    def gather_parameters(self) -> None:
        """Gives every process the slices of all others, by way of the buckets' memory.

        Nobody needs the sums any more; what is left in gaps between rows is never read.
        """
        buckets, sent = self._reduction.buckets.all, 0
        works: dict[int, Any] = {}
        for index, bucket in enumerate(buckets):
            while sent < min(index + 2, len(buckets)):  # the next is on its way while we copy
                real = ops.real_dtype(self._rows.params[buckets[sent].rows[0]].dtype)
                spent = buckets[sent].flat.view(real)[: buckets[sent].flat.numel()]
                works[sent] = self._send(sent, self.slices, spent)
                sent += 1
            work, flat = works.pop(index)
            self._reduction.ranks.call(work.wait, "the gathering of parameters")
            into = [flat_view(self._rows.params[row].detach()) for row in bucket.rows]
            torch._foreach_copy_(into, [self._take(row, flat) for row in bucket.rows])

    def gather(self, slices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Whole tensors from slices that every process has of its own; shaped as parameters.

        Args:
            slices: one a row, there on every process or on none.

        Returns:
            New tensors, on the CPU.
        """
        whole: list[Tensor | None] = [None] * len(slices)
        for index, bucket in enumerate(self._reduction.buckets.all):
            found = {row: s for row in bucket.rows if (s := slices[row]) is not None}
            if not found:
                continue
            dtype = reduce(torch.promote_types, (s.dtype for s in found.values()))
            flat = torch.zeros_like(bucket.flat, dtype=ops.real_dtype(dtype))
            work, flat = self._send(index, slices, flat)
            self._reduction.ranks.call(work.wait, "the gathering of states")
            for row, part in found.items():
                p = self._rows.params[row]
                full = torch.empty_like(p, dtype=part.dtype, device="cpu", requires_grad=False)
                flat_view(full).copy_(self._take(row, flat))
                whole[row] = full
        return whole

    def gather_values(self, of_slice: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Whole tensors by parameter, from those of slices, on the parameters' device."""
        whole = self.gather([of_slice.get(part) for part in self.slices])
        params = self._rows.params
        return {p: t.to(p.device) for p, t in zip(params, whole, strict=True) if t is not None}

    def cut(self, row: int, whole: Tensor) -> Tensor:
        """This process's slice of a tensor that is shaped as the row's parameter; a copy."""
        p = self._rows.params[row]
        like = torch.empty_like(p, dtype=whole.dtype, requires_grad=False).copy_(whole)
        start, end = self._element_bounds(row)
        return flat_view(like)[start:end].clone()

    def save(self) -> list[dict[int, Any]]:
        """The states of each inner optimizer by the number of its parameter, whole. Collective."""
        saved: list[dict[int, Any]] = []
        rows = {id(p): row for row, p in enumerate(self.slices)}
        for own in self.optimizers:
            mine = [p for group in own.param_groups for p in group["params"]]
            keys = dict.fromkeys(key for p in mine for key in own.state.get(p, {}))
            states: dict[int, Any] = {i: {} for i, p in enumerate(mine) if own.state.get(p)}
            for key in keys:
                having = [(i, p) for i, p in enumerate(mine) if key in own.state.get(p, {})]
                whole = self._gather_key({rows[id(p)]: own.state[p][key] for _, p in having})
                for i, p in having:
                    states[i][key] = whole[rows[id(p)]]
            saved.append(states)
        return saved

    def load(self) -> None:
        """Takes over the states that the inner optimizers have loaded, and leaves them none."""
        of_row = iter(enumerate(self.slices))
        for inner, own in zip(self._inners, self.optimizers, strict=True):
            own.state.clear()
            for group in inner.param_groups:
                for p in group["params"]:
                    row, part = next(of_row)
                    if inner.state.get(p):
                        own.state[part] = {
                            key: self.cut(row, value) if _is_whole(key, value, p) else value
                            for key, value in inner.state[p].items()
                        }
            inner.state.clear()

    def _follow_memory(self) -> None:
        """Where ``p.data`` was replaced, its slice lies in the new memory."""
        for row, part in enumerate(self.slices):
            p, (start, _) = self._rows.params[row], self._element_bounds(row)
            if not part.numel() or part.data_ptr() == p.data_ptr() + start * p.element_size():
                continue
            if not self._rows.fits(row):
                raise RuntimeError(
                    "ClockedOptimizer: with shard_states=True a parameter must keep its dtype, "
                    f"shape and strides, got p.data replaced by {tuple(p.shape)} {p.dtype} with "
                    f"strides {p.stride()}; build another wrapper"
                )
            part.data = self._slice(row)

    def _gather_key(self, values: dict[int, Any]) -> dict[int, Any]:
        """One entry of many states: slices become whole, the rest stays as it is."""
        alike = {
            row: value
            for row, value in values.items()
            if isinstance(value, Tensor) and value.shape == self.slices[row].shape and value.dim()
        }
        whole = self.gather([alike.get(row) for row in self._rows.every_row])
        copies = {row: v.clone() if isinstance(v, Tensor) else v for row, v in values.items()}
        return {row: whole[row] if row in alike else copy for row, copy in copies.items()}

    def _send(self, index: int, slices: Sequence[Tensor | None], flat: Tensor) -> Any:
        """Begins to gather a bucket's slices into `flat`; the work, and `flat`."""
        bucket, ranks = self._reduction.buckets.all[index], self._reduction.ranks
        share = self._share(index)
        mine = flat[share]
        for row in bucket.rows:
            part, (start, end) = slices[row], self._bounds[row]
            if part is not None and start < end:
                first = self._reduction.buckets.slots[row].offset + start - share.start
                mine[first : first + end - start] = ops.real_view(part.detach()).reshape(-1)
        sent = all_gather_single(  # as bytes: no backend sends every dtype
            flat.view(torch.uint8), mine.view(torch.uint8), group=ranks.sums, async_op=True
        )
        return sent, flat

    def _take(self, row: int, flat: Tensor) -> Tensor:
        """The row's elements in a bucket's buffer."""
        slot = self._reduction.buckets.slots[row]
        part = flat[slot.offset : slot.offset + slot.numel]
        is_complex = self._rows.dtypes[row].is_complex
        return torch.view_as_complex(part.view(-1, 2)) if is_complex else part

    def _share(self, index: int) -> slice:
        bucket, ranks = self._reduction.buckets.all[index], self._reduction.ranks
        return bucket.share(ranks.rank, ranks.size)

    def _find_bounds(self, row: int) -> tuple[int, int]:
        """First and last real number of the row that this process owns."""
        slot = self._reduction.buckets.slots[row]
        share = self._share(slot.bucket)
        start = min(max(share.start - slot.offset, 0), slot.numel)
        return start, max(start, min(share.stop - slot.offset, slot.numel))

    def _element_bounds(self, row: int) -> tuple[int, int]:
        start, end = self._bounds[row]
        each = 2 if self._rows.dtypes[row].is_complex else 1
        return start // each, end // each

    def _slice(self, row: int) -> Tensor:
        start, end = self._element_bounds(row)
        return flat_view(self._rows.params[row].detach())[start:end]


def flat_view(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _like(group: dict[str, Any], slices: Iterator[Tensor]) -> dict[str, Any]:
    return like_group(group, [next(slices) for _ in group["params"]])


def _is_whole(key: str, value: Any, p: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == p.shape and key != "step"
