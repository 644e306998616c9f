"""Exact fp32 values of 16-bit parameters, kept beside them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from . import ops

__all__ = ["MasterWeights"]


class MasterWeights:
    """The masters of a wrapper's 16-bit parameters, made when they are first needed.

    A bf16 parameter has an int16 remainder: the 16 bits that its fp32 value has more. An fp16
    parameter has a copy in fp32. A parameter that was written from outside since its last update
    goes on from what was written (``p.data`` hides such a write, as it does from autograd).

    Attributes:
        generation: counts what was replaced, for those who keep lists of masters.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._masters: dict[Tensor, Tensor] = {}
        self._versions: dict[Tensor, int] = {}

    def column(self, params: Sequence[Tensor]) -> list[Tensor]:
        """The masters of `params`, made where missing; others stand in their own place."""
        return [self._of(p) if p.dtype in ops.HALVES else p for p in params]

    def follow(self, params: Sequence[Tensor]) -> None:
        """Starts anew from parameters that were written from outside; before an update."""
        for p in params:
            master, version = self._masters.get(p), self._versions.get(p)
            if master is None or version == p._version:
                continue
            if version is not None:
                _restart_(master, p)
            elif not _is_remainder(master):  # loaded: where the two differ, p was written since
                master.copy_(torch.where(master.to(p.dtype) == p, master, p.detach()))

    def settle(self, params: Iterable[Tensor]) -> None:
        """Remembers `params` as an update or a load left them."""
        for p in params:
            self._versions[p] = p._version

    def settle_all(self) -> None:
        """Remembers every parameter that has a master as it is."""
        self.settle(self._masters)

    def value(self, p: Tensor) -> Tensor:
        """The value of `p` as a new tensor, fp32 where it has 16 bits."""
        if p.dtype not in ops.HALVES:
            return p.detach().clone()
        master = self._masters.get(p)
        if master is None:
            return p.detach().to(torch.float32)
        self.follow([p])
        return ops.join(p.detach(), master) if _is_remainder(master) else master.clone()

    def state_dict(self, params: Sequence[Tensor]) -> dict[int, Tensor]:
        """The masters by the index of their parameter; as for moments, no copies."""
        self.follow(params)
        return {i: self._masters[p] for i, p in enumerate(params) if p in self._masters}

    def load_state_dict(self, params: Sequence[Tensor], saved: dict[int, Tensor]) -> int:
        """Takes over what fits; the parameters may be loaded before or after this.

        Returns:
            How many do not fit: they are of a parameter of another dtype or shape.
        """
        self._masters.clear()
        self._versions.clear()
        self.generation += 1
        misfits = 0
        for index, master in saved.items():
            p = params[index]
            if master.shape == p.shape and master.dtype == _dtype_beside(p):
                copied = torch.empty_like(p, dtype=master.dtype, requires_grad=False)
                self._masters[p] = copied.copy_(master)
            else:
                misfits += 1
        return misfits

    def _of(self, p: Tensor) -> Tensor:
        master = self._masters.get(p)
        if master is None or master.shape != p.shape or master.dtype != _dtype_beside(p):
            master = torch.empty_like(p, dtype=_dtype_beside(p), requires_grad=False)
            _restart_(master, p)
            self._masters[p] = master
            self._versions[p] = p._version
            self.generation += 1
        return master


def _dtype_beside(p: Tensor) -> torch.dtype | None:
    return {torch.bfloat16: torch.int16, torch.float16: torch.float32}.get(p.dtype)


def _is_remainder(master: Tensor) -> bool:
    return master.dtype == torch.int16


def _restart_(master: Tensor, p: Tensor) -> None:
    """The master of a parameter that is exact as it is."""
    if _is_remainder(master):
        master.zero_()
    else:
        master.copy_(p.detach())
