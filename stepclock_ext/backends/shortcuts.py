"""Many tensors looked at in one visit, where a backend can."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .contract import Backend
from .layout import Layout

__all__ = ["gather_gradients", "gather_params", "holds_same"]


def gather_gradients(params: list[Tensor], layout: Layout) -> list[Tensor] | None:
    """The gradients of contiguous `params`, if each is there and fits its row as it is.

    One visit to each tensor instead of one for every question; None where there is no such
    shortcut, or where a gradient is missing, strided otherwise, or of another dtype.
    """
    grads = layout.backend.gather_gradients(params, layout)
    if grads is not None:
        layout.verified["ACCUMULATOR"] = grads
    return grads


def gather_params(params: list[Tensor], layout: Layout) -> bool:
    """Whether each of `params`, all contiguous, was seen to fit its row; a shortcut as above."""
    found = layout.backend.gather_params(params, layout)
    if found:
        layout.verified["PARAM"] = params
    return found


def holds_same(
    backend: Backend, dicts: list[dict[str, Any]], key: str, items: list[Tensor]
) -> bool:
    """Whether each dict still holds, under `key`, the very tensor in `items`."""
    native = getattr(backend, "holds_same", None)
    if native is not None:
        return bool(native(dicts, key, items))
    return all(state.get(key) is item for state, item in zip(dicts, items, strict=True))
