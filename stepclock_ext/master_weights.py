"""Exact fp32 values of 16-bit parameters, kept beside them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

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
        versions = self._versions
        for p in params:
            if versions.get(p, p._version) != p._version and p in self._masters:
                _restart_(self._masters[p], p)

    def settle(self, params: Sequence[Tensor]) -> None:
        """Remembers `params` as this update left them."""
        for p in params:
            self._versions[p] = p._version

    def value(self, p: Tensor) -> Tensor:
        """The fp32 value of `p`, a new tensor."""
        master = self._masters.get(p)
        if master is not None:
            self.follow([p])
            return ops.join(p.detach(), master) if _is_remainder(master) else master.clone()
        return p.detach().to(torch.float32, copy=True) if p.dtype in ops.HALVES else p.detach()

    def state_dict(self, params: Sequence[Tensor]) -> dict[int, Tensor]:
        """The masters by the index of their parameter; as for moments, no copies."""
        self.follow(params)
        return {i: self._masters[p] for i, p in enumerate(params) if p in self._masters}

    def load_state_dict(self, params: Sequence[Tensor], saved: dict[int, Tensor]) -> None:
        """Takes over what fits; the parameters may be loaded before or after this."""
        self._masters.clear()
        self._versions.clear()
        self.generation += 1
        misfits = []
        for index, master in saved.items():
            p = params[index]
            if master.shape == p.shape and master.dtype == _dtype_beside(p):
                copied = torch.empty_like(p, dtype=master.dtype, requires_grad=False)
                self._masters[p] = copied.copy_(master)
            else:
                misfits.append(index)
        if misfits:
            warnings.warn(
                f"ClockedOptimizer.load_state_dict: dropped the masters of {len(misfits)} "
                "parameters, which are of another dtype or shape here; their masters start from "
                "the parameters as they are",
                stacklevel=2,
            )

    def _of(self, p: Tensor) -> Tensor:
        master = self._masters.get(p)
        if master is None or master.shape != p.shape or master.dtype != _dtype_beside(p):
            master = torch.empty_like(p, dtype=_dtype_beside(p), requires_grad=False)
            _restart_(master, p)
            self._masters[p] = master
            self.generation += 1
        return master

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_versions": {}}  # a copied parameter counts its versions anew


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
