"""A layout as kernels on a device read it: chunks, sizes and addresses in device memory.

Chunks and sizes are sent once. Addresses are sent when one of them has changed, through pinned
memory and in the order of the stream, so that neither side waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import CHUNK_ELEMENTS, Layout, num_chunks

__all__ = ["COLUMNS", "DeviceTable", "Section"]

# In the order of `Column` in csrc/contract.h.
COLUMNS = (
    "PARAM",
    "GRAD",
    "ACCUMULATOR",
    "EXP_AVG",
    "EXP_AVG_SQ",
    "MAX_EXP_AVG_SQ",
    "BUFFER",
    "STEP",
    "MASTER",
    "AVERAGE",
)


@dataclass(frozen=True)
class Section:
    """A run of chunks whose rows have the same dtypes: they share a launch.

    Attributes:
        first_chunk: in the table's list of chunks.
        num_chunks: in the run.
        param: dtype of parameters and micro gradients.
        accumulator: dtype of window sums.
        state: dtype of moments and buffer.
    """

    first_chunk: int
    num_chunks: int
    param: torch.dtype
    accumulator: torch.dtype
    state: torch.dtype


class DeviceTable:
    """The chunks, sizes and addresses of one layout.

    Args:
        layout: what the tensors look like.
        device: where they are.

    Attributes:
        chunks: int64, shape (chunks, 3): row, first element, slot; section after section.
        num_elements: int64, shape (rows,).
        addresses: int64, shape (columns, rows); 0 where a column is not bound.
        biases: fp64, shape (rows, 2): scratch for 1 - beta**step.
        sections: of `chunks`.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        num_rows = len(layout.num_elements)
        self.device = device
        # device="cpu" also where another default device is set.
        self._addresses = torch.zeros((len(COLUMNS), num_rows), dtype=torch.int64, device="cpu")
        self._is_sent = False
        self._staged = self._addresses
        self.sections, chunks = _cut(layout)
        self.chunks = torch.tensor(chunks, dtype=torch.int64, device=device).reshape(-1, 3)
        self.num_elements = torch.tensor(layout.num_elements, dtype=torch.int64, device=device)
        self.addresses = torch.zeros_like(self._addresses, device=device)
        self.biases = torch.zeros((num_rows, 2), dtype=torch.float64, device=device)

    def bind(self, column: str, tensors: Sequence[Tensor]) -> bool:
        """Points a column at `tensors`, one a row; whether one of them has moved."""
        now = torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device="cpu")
        row = self._addresses[COLUMNS.index(column)]
        moved = not torch.equal(row, now)
        if moved:
            row.copy_(now)
            self._is_sent = False
        return moved

    def send(self) -> None:
        """Brings the addresses to the device, if one has changed since the last time."""
        if self._is_sent:
            return
        # Kept until the next time: a captured graph reads it again.
        pinned = self.device.type == "cuda"
        self._staged = self._addresses.pin_memory() if pinned else self._addresses.clone()
        self.addresses.copy_(self._staged, non_blocking=True)
        self._is_sent = True


def _cut(layout: Layout) -> tuple[tuple[Section, ...], list[tuple[int, int, int]]]:
    """Sections, and row, first element and slot of each chunk."""
    kinds: dict[tuple[torch.dtype, torch.dtype, torch.dtype], list[int]] = {}
    for row, param in enumerate(layout.dtypes):
        kind = (param, layout.accumulator_dtypes[row], layout.state_dtypes[row])
        kinds.setdefault(kind, []).append(row)
    sections: list[Section] = []
    chunks: list[tuple[int, int, int]] = []
    for kind, rows in kinds.items():
        first = len(chunks)
        for row in rows:
            for i in range(num_chunks(layout.num_elements[row])):
                chunks.append((row, i * CHUNK_ELEMENTS, layout.first_slots[row] + i))
        if len(chunks) > first:
            sections.append(Section(first, len(chunks) - first, *kind))
    return tuple(sections), chunks
