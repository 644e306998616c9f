"""The contract in Triton: on NVIDIA, AMD and Intel GPUs, and interpreted on a CPU.

One launch an op and section, whatever the number of tensors. With TRITON_INTERPRET=1 in the
environment, set before Triton is first imported, the same kernels run on CPU tensors, slowly.
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .contract import (
    AccumulateSlots,
    AdamScalars,
    AdamStates,
    BackendStatus,
    Companions,
    SgdScalars,
)
from .device_table import Section
from .layout import CHUNK_ELEMENTS, HALVES, Layout
from .table_backend import TableBackend
from .triton_launch import Launcher, TritonTable, find_device, log_parts, to_bits

__all__ = ["TritonBackend", "status"]

# Up to here one program folds all slots; beyond, each takes a block or more of them.
_FEW_BLOCKS = 4
_MAX_PARTIALS = 1024


def status() -> BackendStatus:
    """Whether Triton is installed and has something to run on."""
    if importlib.util.find_spec("triton") is None:
        return BackendStatus(available=False, reason="triton is not installed; pip install triton")
    device = find_device()
    if device is None:
        return BackendStatus(available=False, reason="no GPU that triton can use")
    try:
        version = importlib.import_module("triton").__version__
        if device.type == "cpu":
            how = "interpreted (TRITON_INTERPRET=1), on CPU tensors"
        else:
            driver = importlib.import_module("triton.runtime").driver
            how = f"{driver.active.get_current_target()}"
    except (ImportError, OSError, RuntimeError, subprocess.CalledProcessError) as e:
        return BackendStatus(available=False, reason=f"no GPU that triton can use: {e}")
    return BackendStatus(available=True, reason=f"triton {version}, {how}")


class TritonBackend(TableBackend):
    """The contract on Triton's kernels, launched on the current stream.

    Attributes:
        device: where tensors must be: the one given, or the GPU that is current now.
        settles_late: it is a GPU, which runs on while the host goes on.

    Raises:
        RuntimeError: see `status`.
    """

    name = "triton"

    def __init__(self, device: torch.device | None = None) -> None:
        device, found = find_device(device), status()
        if not found.available or device is None:
            raise RuntimeError(f"backend 'triton': {found.reason}")
        self.device = device
        self.settles_late = device.type != "cpu"
        self._launcher = Launcher(device)
        elements = importlib.import_module(".triton_elements", __package__)
        self._block: int = elements.BLOCK.value
        self._parts = CHUNK_ELEMENTS // self._block
        self._sums: Any = importlib.import_module(".triton_sums", __package__)
        self._updates: Any = importlib.import_module(".triton_updates", __package__)
        self._partials = torch.zeros(_MAX_PARTIALS, dtype=torch.float64, device=device)

    def sum_squares_(self, slots: Tensor, tensors: Sequence[Tensor], layout: Layout) -> None:
        self._on_sums(self._sums.sum_squares_kernel, 1, slots, tensors, layout)

    def max_abs_(self, slots: Tensor, tensors: Sequence[Tensor], layout: Layout) -> None:
        self._on_sums(self._sums.max_abs_kernel, 1, slots, tensors, layout)

    def accumulate_(
        self,
        accumulators: Sequence[Tensor],
        slots: AccumulateSlots,
        grads: Sequence[Tensor],
        layout: Layout,
        *,
        store: bool,
    ) -> None:
        columns = {"ACCUMULATOR": accumulators, "GRAD": grads}
        table = self._bind(layout, columns)
        wanted = (slots.sums, slots.grad_sums, slots.prior_sums)
        into = [self._partials if each is None else each for each in wanted]
        flags = {
            "STORE": store,
            "SUMS": slots.sums is not None,
            "GRAD_SUMS": slots.grad_sums is not None,
            "PRIOR_SUMS": slots.prior_sums is not None,
        }
        for section in table.sections:
            kernel, num_programs = self._sums.accumulate_kernel, section.num_chunks
            self._launcher.on_section(kernel, num_programs, into, table, section, columns, **flags)

    def coefficient_(
        self, stats: Tensor, slots: Tensor, *, divisor: float, max_norm: float, maxima: bool
    ) -> None:
        num_slots = slots.numel()
        if num_slots > _FEW_BLOCKS * self._block:
            each = -(-num_slots // (_MAX_PARTIALS * self._block)) * self._block
            num_programs = -(-num_slots // each)
            into = (self._partials, slots, num_slots, each)
            self._launcher.run(self._sums.fold_kernel, num_programs, into, MAXIMA=maxima)
            slots, num_slots = self._partials, num_programs
        arguments = (stats, slots, num_slots, to_bits(divisor), to_bits(max_norm))
        self._launcher.run(self._sums.coefficient_kernel, 1, arguments, MAXIMA=maxima)

    def scale_(self, tensors: Sequence[Tensor], stats: Tensor, layout: Layout) -> None:
        self._on_sums(self._sums.scale_kernel, self._parts, stats, tensors, layout)

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
        s, maxima = scalars, states.max_exp_avg_sqs
        columns: dict[str, Sequence[Tensor]] = {"PARAM": params, "ACCUMULATOR": sums}
        columns |= {"EXP_AVG": states.exp_avgs, "EXP_AVG_SQ": states.exp_avg_sqs}
        if maxima is not None:
            columns["MAX_EXP_AVG_SQ"] = maxima
        columns |= _columns_of(companions)
        table = self._bind(layout, {**columns, "STEP": states.steps})
        num_rows = len(states.steps)
        logs = (*log_parts(s.beta1), *log_parts(s.beta2))
        rows = (table.biases, table.addresses, stats, num_rows, *map(to_bits, (s.lr, *logs)))
        kernel, num_programs = (
            self._updates.advance_steps_kernel,
            -(-num_rows // self._updates.ROWS.value),
        )
        self._launcher.run(kernel, num_programs, rows, GATED=companions.is_gated)

        decoupled = s.decoupled or s.weight_decay == 0.0  # a factor of 1 changes nothing
        decay = 1.0 - s.lr * s.weight_decay if decoupled else s.weight_decay
        numbers = (s.eps, decay, s.beta2, 1.0 - s.beta1, 1.0 - s.beta2)
        flags = {"DECOUPLED": decoupled, "AMSGRAD": maxima is not None, "MAXIMIZE": s.maximize}
        kernel, first = self._updates.adam_kernel, (table.biases, stats)
        self._update(kernel, first, table, columns, numbers, companions, **flags)

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
        s = scalars
        columns = {"PARAM": params, "ACCUMULATOR": sums, **_columns_of(companions)}
        if buffers is not None:
            columns["BUFFER"] = buffers
        table = self._bind(layout, columns)
        numbers = (s.lr, s.weight_decay, s.momentum, 1.0 - s.dampening)
        flags = {
            "DECAY": s.weight_decay != 0.0,
            "MOMENTUM": buffers is not None,
            "FIRST": s.first,
            "NESTEROV": s.nesterov,
            "MAXIMIZE": s.maximize,
        }
        kernel = self._updates.sgd_kernel
        self._update(kernel, (stats,), table, columns, numbers, companions, **flags)

    def move_average_(
        self, params: Sequence[Tensor], stats: Tensor, layout: Layout, companions: Companions
    ) -> None:
        columns = {"PARAM": params, **_columns_of(companions)}
        table = self._bind(layout, columns)
        kernel, weight = self._updates.move_average_kernel, to_bits(companions.average_weight)
        for section in table.sections:
            masters, used = _masters_of(section, columns)
            flags = {"MASTERS": masters, "GATED": companions.is_gated}
            num_programs = section.num_chunks * self._parts
            self._launcher.on_section(
                kernel, num_programs, (stats,), table, section, used, weight, **flags
            )

    def _on_sums(
        self, kernel: Any, parts: int, first: Tensor, tensors: Sequence[Tensor], layout: Layout
    ) -> None:
        """Launches a kernel that takes window sums alone, on chunks cut into `parts`."""
        columns = {"ACCUMULATOR": tensors}
        table = self._bind(layout, columns)
        for section in table.sections:
            num_programs = section.num_chunks * parts
            self._launcher.on_section(kernel, num_programs, (first,), table, section, columns)

    def _update(
        self,
        kernel: Any,
        first: Sequence[Tensor],
        table: TritonTable,
        columns: Mapping[str, Sequence[Tensor]],
        numbers: Sequence[float],
        companions: Companions,
        **flags: bool,
    ) -> None:
        """Launches an update on each section, with what moves along there."""
        key = companions.rounding_key or 0
        signed = key - 2**64 if key >= 2**63 else key
        bits = [*map(to_bits, (*numbers, companions.average_weight)), signed]
        for section in table.sections:
            masters, used = _masters_of(section, columns)
            is_half = section.param in HALVES
            along = {
                "MASTERS": masters,
                "AVERAGES": companions.averages is not None,
                "STOCHASTIC": companions.rounding_key is not None and is_half and not masters,
                "GATED": companions.is_gated,
            }
            num_programs = section.num_chunks * self._parts
            self._launcher.on_section(
                kernel, num_programs, first, table, section, used, *bits, **flags, **along
            )

    def _bind(self, layout: Layout, columns: Mapping[str, Sequence[Tensor]]) -> TritonTable:
        """Points the layout's table at the tensors that an op uses."""
        table: TritonTable | None = layout.cache.get(self.name)
        if table is None or not layout.cache.get("dtypes_sent"):
            table = layout.cache[self.name] = TritonTable(layout, self.device)
            layout.cache["dtypes_sent"] = True
        for column, tensors in columns.items():
            self.point(layout, column, tensors, table.bind)
        table.send()
        return table


def _columns_of(companions: Companions) -> dict[str, Sequence[Tensor]]:
    columns = {"MASTER": companions.masters, "AVERAGE": companions.averages}
    return {column: tensors for column, tensors in columns.items() if tensors is not None}


def _masters_of(section: Section, columns: Mapping[str, Any]) -> tuple[bool, list[str]]:
    """Whether masters are used there, and the columns that are; wider rows have no masters."""
    has_masters = "MASTER" in columns and section.param in HALVES
    return has_masters, [column for column in columns if column != "MASTER" or has_masters]
