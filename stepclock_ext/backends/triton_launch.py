"""How Triton kernels are launched on a table of tensors."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import struct
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from .device_table import COLUMNS, DeviceTable, Section
from .layout import Layout

__all__ = ["DTYPES", "Launcher", "TritonTable", "find_device", "log_parts", "to_bits"]

_VECTOR_BYTES = 16
DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def find_device(given: torch.device | None = None) -> torch.device | None:
    """Where Triton's kernels run in this process: on the device given, if it can be that one."""
    if _is_interpreted():
        return torch.device("cpu")
    for kind, runtime in (("cuda", torch.cuda), ("xpu", torch.xpu)):  # cuda: NVIDIA and AMD
        if not runtime.is_available():
            continue
        if given is not None and given.type == kind and given.index is not None:
            return given
        return torch.device(kind, runtime.current_device())
    return None


class TritonTable(DeviceTable):
    """The chunks, sizes, addresses and alignment of one layout.

    Args:
        layout: what the tensors look like.
        device: where they are.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        super().__init__(layout, device)
        self._num_rows = len(layout.num_elements)
        self._rows: dict[Section, list[int]] = {section: [] for section in self.sections}
        by_kind = {(s.param, s.accumulator, s.state): s for s in self.sections}
        for row, size in enumerate(layout.num_elements):
            kind = (layout.dtypes[row], layout.accumulator_dtypes[row], layout.state_dtypes[row])
            if size:
                self._rows[by_kind[kind]].append(row)
        self._itemsizes = {
            (section, column): layout.dtype(column, rows[0]).itemsize
            for section, rows in self._rows.items()
            for column in COLUMNS
        }
        self._is_aligned: dict[tuple[Section, str], bool] = {}

    def bind(self, column: str, tensors: Sequence[Tensor]) -> bool:
        """As that of a device table."""
        moved = super().bind(column, tensors)
        for section, rows in self._rows.items():
            if moved or (section, column) not in self._is_aligned:
                aligned = all(tensors[row].data_ptr() % _VECTOR_BYTES == 0 for row in rows)
                self._is_aligned[section, column] = aligned
        return moved

    def arguments(self, section: Section) -> tuple[Any, ...]:
        """What every kernel on a section is told of the table."""
        table = (self.chunks, self.num_elements, self.addresses)
        return (*table, self._num_rows, section.first_chunk)

    def is_aligned(self, section: Section, columns: Collection[str]) -> bool:
        """Whether all tensors of these columns begin where a vector may; then chunks do as well."""
        return all(self._is_aligned[section, column] for column in columns)

    def num_warps(self, section: Section, columns: Collection[str]) -> int:
        """Warps of a program; see `BLOCK` in triton_elements.py."""
        return 8 if len({self._itemsizes[section, column] for column in columns}) == 1 else 16


class Launcher:
    """Launches kernels on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        language = importlib.import_module("triton.language")
        self._dtypes = {dtype: getattr(language, name) for dtype, name in DTYPES.items()}

    def on_section(
        self,
        kernel: Any,
        num_programs: int,
        first: Sequence[Tensor],
        table: TritonTable,
        section: Section,
        columns: Collection[str],
        *numbers: int,
        **constants: bool,
    ) -> None:
        """Launches a kernel on a section: `first`, the table, `numbers`, then constants."""
        dtypes = {
            "PARAM": section.param,
            "GRAD": section.param,
            "ACCUMULATOR": section.accumulator,
            "STATE": section.state,
        }
        taken = {name: self._dtypes[dtype] for name, dtype in dtypes.items()}
        self.run(
            kernel,
            num_programs,
            (*first, *table.arguments(section), *numbers),
            num_warps=table.num_warps(section, columns),
            ALIGNED=table.is_aligned(section, columns),
            **{name: dtype for name, dtype in taken.items() if name in kernel.arg_names},
            **constants,
        )

    def run(self, kernel: Any, num_programs: int, arguments: Sequence[Any], **options: Any) -> None:
        """Launches without fused multiply-add: an element's bits are those of the CPU."""
        if num_programs == 0:
            return
        with self._on_device():
            kernel[(num_programs,)](*arguments, enable_fp_fusion=False, **options)

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        if self.device.type == "cpu":
            return contextlib.nullcontext()
        on_device: contextlib.AbstractContextManager[Any] = torch.get_device_module(
            self.device
        ).device(self.device)
        return on_device


def to_bits(number: float) -> int:
    """The bits of an fp64 number as an integer, as kernels take it."""
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


def log_parts(beta: float) -> tuple[float, float]:
    """log(beta) as 24 bits, whose product with a step is exact, and the rest of it."""
    if beta == 0.0:
        return -math.inf, 0.0
    log = math.log(beta)
    upper: float = struct.unpack("<f", struct.pack("<f", log))[0]
    return upper, log - upper
