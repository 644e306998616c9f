"""Collectives of one tensor, by the names that this torch has for them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

__all__ = ["all_gather_single", "reduce_scatter_single"]


def all_gather_single(
    out: Tensor, mine: Tensor, *, group: ProcessGroup, async_op: bool = False
) -> Any:
    """Fills `out` with every rank's `mine`, in rank order; the work, where `async_op` is set."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    return getattr(dist, name)(out, mine, group=group, async_op=async_op)


def reduce_scatter_single(
    out: Tensor, flat: Tensor, *, group: ProcessGroup, async_op: bool = False
) -> Any:
    """Fills `out` with this rank's share of the sum of `flat`; the work, as above."""
    has_single = hasattr(dist, "reduce_scatter_single")
    name = "reduce_scatter_single" if has_single else "reduce_scatter_tensor"
    return getattr(dist, name)(out, flat, group=group, async_op=async_op)
