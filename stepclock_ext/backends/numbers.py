"""The fp64 numbers that ops write: slots, one a chunk, and the stats of a window."""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import Layout

__all__ = ["check_doubles", "check_slots", "check_stats", "make_slots", "make_stats"]


def make_slots(num_slots: int, device: torch.device | str = "cpu") -> Tensor:
    """Zeroed slots, fp64, shape (num_slots,)."""
    return torch.zeros(num_slots, dtype=torch.float64, device=device)


def make_stats(device: torch.device | str = "cpu") -> Tensor:
    """The stats of a window that needs no correction: norm 0, coefficient 1, clip factor 1."""
    return torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64, device=device)


def check_slots(slots: Tensor, layout: Layout) -> None:
    """Refuses slots that are too few for `layout`, or no fp64."""
    num_slots = layout.cache.get("num_slots")
    if num_slots is None:
        num_slots = layout.cache["num_slots"] = layout.num_slots
    check_doubles("slots", slots, num_slots)


def check_stats(stats: Tensor) -> None:
    """Refuses stats that are no three fp64 values."""
    check_doubles("stats", stats, 3)


def check_doubles(name: str, tensor: Tensor, at_least: int) -> None:
    """Refuses what a kernel could not write through its address."""
    if tensor.dtype == torch.float64 and tensor.is_contiguous() and tensor.numel() >= at_least:
        return
    raise ValueError(
        f"{name} must be fp64, contiguous, {at_least} elements or more, got {tensor.dtype}, "
        f"strides {tensor.stride()}, {tensor.numel()} elements"
    )
