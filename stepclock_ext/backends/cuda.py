"""CUDA kernels in C++ (module ``_CUDA``), on the stream and device of their tensors.

Addresses are read anew for every op and sent to the device when one has changed. When one did
change under the same list, its column is checked again before the kernel runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .compiled import DTYPE_CODES, adam_settings, companion_settings, sgd_settings
from .contract import (
    AccumulateSlots,
    AdamScalars,
    AdamStates,
    BackendStatus,
    Companions,
    SgdScalars,
)
from .device_table import DeviceTable
from .layout import Layout
from .table_backend import TableBackend

__all__ = ["CudaBackend", "load", "status"]


def load() -> ModuleType | None:
    """The compiled module, or None where it was not built."""
    try:
        return importlib.import_module("stepclock_ext._CUDA")
    except ImportError:
        return None


def status() -> BackendStatus:
    """Whether the compiled module is here, and a GPU that it can use."""
    module = load()
    if module is None:
        reason = "stepclock_ext._CUDA was not built; reinstall with nvcc (STEPCLOCK_CUDA=1)"
        return BackendStatus(available=False, reason=reason)
    toolkit = f"{module.TOOLKIT // 1000}.{module.TOOLKIT % 1000 // 10}"
    built = f"CUDA {toolkit} kernels for sm_{module.ARCHS.replace(' ', ', sm_')}"
    fault = module.find_fault()
    if not fault and not torch.cuda.is_available():
        fault = f"this torch ({torch.__version__}) sees no CUDA device"
    if fault:
        return BackendStatus(available=False, reason=f"{built}, but {fault}")
    return BackendStatus(available=True, reason=built)


class CudaBackend(TableBackend):
    """The contract on ``_CUDA``, launched on the current stream.

    Attributes:
        device: where tensors must be.

    Raises:
        RuntimeError: see `status`.
    """

    name = "cuda"
    settles_late = True

    def __init__(self, device: torch.device | None = None) -> None:
        module, found = load(), status()
        if module is None or not found.available:
            raise RuntimeError(f"backend 'cuda': {found.reason}")
        self._c: Any = module
        index = None if device is None else device.index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        scratch_bytes = module.SCRATCH_BYTES
        self._scratch = torch.zeros(scratch_bytes, dtype=torch.uint8, device=self.device)

    def sum_squares_(self, slots: Tensor, tensors: Sequence[Tensor], layout: Layout) -> None:
        table, _ = self._bind(layout, ACCUMULATOR=tensors)
        self._c.sum_squares(slots.data_ptr(), table, self._stream())

    def max_abs_(self, slots: Tensor, tensors: Sequence[Tensor], layout: Layout) -> None:
        table, _ = self._bind(layout, ACCUMULATOR=tensors)
        self._c.max_abs(slots.data_ptr(), table, self._stream())

    def accumulate_(
        self,
        accumulators: Sequence[Tensor],
        slots: AccumulateSlots,
        grads: Sequence[Tensor],
        layout: Layout,
        *,
        store: bool,
    ) -> None:
        table, _ = self._bind(layout, ACCUMULATOR=accumulators, GRAD=grads)
        into = (slots.sums, slots.grad_sums, slots.prior_sums)
        addresses = [0 if wanted is None else wanted.data_ptr() for wanted in into]
        self._c.accumulate(table, store, *addresses, self._stream())

    def coefficient_(
        self, stats: Tensor, slots: Tensor, *, divisor: float, max_norm: float, maxima: bool
    ) -> None:
        addresses = stats.data_ptr(), self._scratch.data_ptr(), slots.data_ptr()
        where = self.device.index, self._stream()
        self._c.coefficient(*addresses, slots.numel(), divisor, max_norm, maxima, *where)

    def scale_(self, tensors: Sequence[Tensor], stats: Tensor, layout: Layout) -> None:
        table, _ = self._bind(layout, ACCUMULATOR=tensors)
        self._c.scale(table, stats.data_ptr(), self._stream())

    def adam_(
        self,
        params: Sequence[Tensor],
        states: AdamStates,
        sums: Sequence[Tensor],
        stats: Tensor,
        layout: Layout,
        scalars: AdamScalars,
        companions: Companions,
    ) -> None:
        table, biases = self._bind(
            layout,
            PARAM=params,
            ACCUMULATOR=sums,
            EXP_AVG=states.exp_avgs,
            EXP_AVG_SQ=states.exp_avg_sqs,
            MAX_EXP_AVG_SQ=states.max_exp_avg_sqs,
            STEP=states.steps,
            MASTER=companions.masters,
            AVERAGE=companions.averages,
        )
        settings = adam_settings(self._c, scalars)
        along, address = companion_settings(self._c, companions), stats.data_ptr()
        self._c.adam(table, biases, address, settings, along, scalars.maximize, self._stream())

    def sgd_(
        self,
        params: Sequence[Tensor],
        buffers: Sequence[Tensor] | None,
        sums: Sequence[Tensor],
        stats: Tensor,
        layout: Layout,
        scalars: SgdScalars,
        companions: Companions,
    ) -> None:
        table, _ = self._bind(
            layout,
            PARAM=params,
            ACCUMULATOR=sums,
            BUFFER=buffers,
            MASTER=companions.masters,
            AVERAGE=companions.averages,
        )
        settings = sgd_settings(self._c, scalars, has_buffers=buffers is not None)
        along, address = companion_settings(self._c, companions), stats.data_ptr()
        self._c.sgd(table, address, settings, along, scalars.maximize, self._stream())

    def move_average_(
        self, params: Sequence[Tensor], stats: Tensor, layout: Layout, companions: Companions
    ) -> None:
        columns = {"MASTER": companions.masters, "AVERAGE": companions.averages}
        table, _ = self._bind(layout, PARAM=params, **columns)
        along = companion_settings(self._c, companions)
        self._c.move_average(table, stats.data_ptr(), along, self._stream())

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def _bind(self, layout: Layout, **columns: Sequence[Tensor] | None) -> tuple[Any, int]:
        """Points the layout's table at `columns` and sends it; the table, and its biases."""
        table, native = self._tables(layout)
        for column, tensors in columns.items():
            if tensors is not None:
                self.point(layout, column, tensors, table.bind)
        table.send()
        return native, table.biases.data_ptr()

    def _tables(self, layout: Layout) -> tuple[DeviceTable, Any]:
        """The layout's table, built anew when the dtypes of its states have changed."""
        if not layout.cache.get("dtypes_sent"):
            table = DeviceTable(layout, self.device)
            native = self._c.Table(
                chunks=table.chunks.data_ptr(),
                num_elements=table.num_elements.data_ptr(),
                addresses=table.addresses.data_ptr(),
                num_rows=len(layout.num_elements),
                sections=[
                    (
                        section.first_chunk,
                        section.num_chunks,
                        DTYPE_CODES[section.param],
                        DTYPE_CODES[section.accumulator],
                        DTYPE_CODES[section.state],
                    )
                    for section in table.sections
                ],
                device=self.device.index,
            )
            layout.cache[self.name] = table, native
            layout.cache["dtypes_sent"] = True
        tables: tuple[DeviceTable, Any] = layout.cache[self.name]
        return tables
