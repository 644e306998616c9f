"""What backends that keep a table of addresses have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .layout import Layout, is_dense, real_dtype

__all__ = ["TableBackend"]

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class TableBackend:
    """Addresses are read anew for every op, so a tensor that moved is never written where it was.

    Attributes:
        device: where tensors must be.
    """

    device: torch.device
    watches_addresses = True

    def supports(self, tensor: Tensor) -> bool:
        return (
            tensor.device == self.device
            and tensor.layout == torch.strided
            and real_dtype(tensor.dtype) in _DTYPES
            and not tensor.is_conj()
            and is_dense(tensor)
        )

    def release(self, layout: Layout, columns: Sequence[str]) -> None:
        bound = layout.cache.get("bound", {})
        for column in columns:
            bound.pop(column, None)

    def gather_params(self, params: list[Tensor], layout: Layout) -> bool:
        """No shortcut."""
        return False

    def gather_gradients(self, params: list[Tensor], layout: Layout) -> list[Tensor] | None:
        """No shortcut."""
        return None

    def point(
        self,
        layout: Layout,
        column: str,
        tensors: Sequence[Tensor],
        bind: Callable[[str, Sequence[Tensor]], bool],
    ) -> None:
        """Points a column at `tensors`, and checks it again where one moved under the same list.

        Args:
            layout: of the column.
            column: its name.
            tensors: one a row.
            bind: writes the addresses into the backend's table; whether one has changed.
        """
        bound = layout.cache.setdefault("bound", {})
        same_list = bound.pop(column, None) is tensors
        if bind(column, tensors) and same_list:  # t.data was replaced under us
            layout.verified.pop(column, None)
            layout.verify(column, tensors)
        bound[column] = tensors
