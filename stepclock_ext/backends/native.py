"""CPU kernels in C++ (module ``_C``), on dense tensors of fp32, fp64, bf16 and fp16.

Addresses are read anew for every op, so a tensor that moved is never written where it was. When
one did move, its column is checked again before the kernel runs.
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
from .layout import Layout
from .table_backend import TableBackend

__all__ = ["NativeBackend", "load", "status"]


def load() -> ModuleType | None:
    """The compiled module, or None where it was not built."""
    try:
        return importlib.import_module("stepclock_ext._C")
    except ImportError:
        return None


def status() -> BackendStatus:
    """Whether the compiled module is here."""
    module = load()
    if module is None:
        reason = (
            "stepclock_ext._C was not built; reinstall with a C++ compiler (STEPCLOCK_NATIVE=1)"
        )
        return BackendStatus(available=False, reason=reason)
    return BackendStatus(available=True, reason=f"{module.isa()} kernels, {module.thread_pool()}")


class NativeBackend(TableBackend):
    """The contract on ``_C``; threads follow ``torch.get_num_threads()``."""

    name = "cpu"
    device = torch.device("cpu")
    settles_late = False

    def __init__(self) -> None:
        module = load()
        if module is None:
            raise RuntimeError(f"backend 'cpu': {status().reason}")
        self._c: Any = module
        exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)  # torch >= 2.10
        if exchange is not None:
            module.use_exchange_api(exchange)
        self._sums = module.Column.ACCUMULATOR
        self._columns = {name: int(column) for name, column in module.Column.__members__.items()}

    def release(self, layout: Layout, columns: Sequence[str]) -> None:
        super().release(layout, columns)
        layout.cache.pop("gathered", None)

    def holds_same(self, dicts: list[dict[str, Any]], key: str, items: list[Any]) -> bool:
        """Whether each dict still holds, under `key`, the very object in `items`."""
        return bool(self._c.holds_same(dicts, key, items))

    def sum_squares_(self, slots: Tensor, tensors: Sequence[Tensor], layout: Layout) -> None:
        table = self._bind(layout, "ACCUMULATOR", tensors)
        self._c.sum_squares(slots.data_ptr(), table, self._sums, torch.get_num_threads())

    def max_abs_(self, slots: Tensor, tensors: Sequence[Tensor], layout: Layout) -> None:
        table = self._bind(layout, "ACCUMULATOR", tensors)
        self._c.max_abs(slots.data_ptr(), table, self._sums, torch.get_num_threads())

    def accumulate_(
        self,
        accumulators: Sequence[Tensor],
        slots: AccumulateSlots,
        grads: Sequence[Tensor],
        layout: Layout,
        *,
        store: bool,
    ) -> None:
        table = self._bind(layout, "ACCUMULATOR", accumulators)
        self._bind(layout, "GRAD", grads)
        into = (slots.sums, slots.grad_sums, slots.prior_sums)
        addresses = [0 if wanted is None else wanted.data_ptr() for wanted in into]
        self._c.accumulate(table, store, *addresses, torch.get_num_threads())

    def coefficient_(
        self, stats: Tensor, slots: Tensor, *, divisor: float, max_norm: float, maxima: bool
    ) -> None:
        self._c.coefficient(
            stats.data_ptr(), slots.data_ptr(), slots.numel(), divisor, max_norm, maxima
        )

    def scale_(self, tensors: Sequence[Tensor], stats: Tensor, layout: Layout) -> None:
        table = self._bind(layout, "ACCUMULATOR", tensors)
        self._c.scale(table, self._sums, _coefficient_address(stats), torch.get_num_threads())

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
        table = self._bind(layout, "PARAM", params)
        self._bind(layout, "ACCUMULATOR", sums)
        self._bind(layout, "EXP_AVG", states.exp_avgs)
        self._bind(layout, "EXP_AVG_SQ", states.exp_avg_sqs)
        if states.max_exp_avg_sqs is not None:
            self._bind(layout, "MAX_EXP_AVG_SQ", states.max_exp_avg_sqs)
        self._bind(layout, "STEP", states.steps)
        settings = adam_settings(self._c, scalars)
        along = self._bind_companions(layout, companions)
        threads = torch.get_num_threads()
        self._c.adam(table, settings, along, stats.data_ptr(), scalars.maximize, threads)

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
        table = self._bind(layout, "PARAM", params)
        self._bind(layout, "ACCUMULATOR", sums)
        if buffers is not None:
            self._bind(layout, "BUFFER", buffers)
        settings = sgd_settings(self._c, scalars, has_buffers=buffers is not None)
        along = self._bind_companions(layout, companions)
        threads = torch.get_num_threads()
        self._c.sgd(table, settings, along, stats.data_ptr(), scalars.maximize, threads)

    def move_average_(
        self, params: Sequence[Tensor], stats: Tensor, layout: Layout, companions: Companions
    ) -> None:
        table = self._bind(layout, "PARAM", params)
        along = self._bind_companions(layout, companions)
        self._c.move_average(table, along, stats.data_ptr(), torch.get_num_threads())

    def gather_params(self, params: list[Tensor], layout: Layout) -> bool:
        """Points the layout's table at `params`, if each of them fits as it is."""
        found = bool(self._table(layout).gather_params(params))
        if found:
            layout.cache["gathered"] = (params,)
        return found

    def gather_gradients(self, params: list[Tensor], layout: Layout) -> list[Tensor] | None:
        """Each parameter's gradient, if all are there and fit `layout` as they are."""
        if layout.accumulator_dtypes != layout.dtypes:
            return None  # the sums do not lie in .grad
        grads: list[Tensor] | None = self._table(layout).gather_gradients(params)
        if grads is not None:
            layout.cache["gathered"] = (params, grads)
        return grads

    def _bind_companions(self, layout: Layout, companions: Companions) -> Any:
        """Binds what moves along; returns the rest of it as the module takes it."""
        if companions.masters is not None:
            self._bind(layout, "MASTER", companions.masters)
        if companions.averages is not None:
            self._bind(layout, "AVERAGE", companions.averages)
        return companion_settings(self._c, companions)

    def _table(self, layout: Layout) -> Any:
        table = layout.cache.get(self.name)
        if table is None:
            codes = [DTYPE_CODES[dtype] for dtype in layout.dtypes]
            table = self._c.Table(list(layout.num_elements), codes, list(layout.first_slots))
            layout.cache[self.name] = table
        if not layout.cache.get("dtypes_sent"):
            table.set_dtypes(
                [DTYPE_CODES[dtype] for dtype in layout.accumulator_dtypes],
                [DTYPE_CODES[dtype] for dtype in layout.state_dtypes],
            )
            layout.cache["dtypes_sent"] = True
        return table

    def _bind(self, layout: Layout, column: str, tensors: Sequence[Tensor]) -> Any:
        """Points a column of the layout's table at `tensors`; returns the table."""
        table = self._table(layout)
        if any(tensors is gathered for gathered in layout.cache.get("gathered", ())):
            return table

        def bind(name: str, now: Sequence[Tensor]) -> bool:
            listed = now if isinstance(now, list) else list(now)
            return bool(table.bind(self._columns[name], listed))

        self.point(layout, column, tensors, bind)
        return table


def _coefficient_address(stats: Tensor) -> int:
    return stats.data_ptr() + stats.element_size()
