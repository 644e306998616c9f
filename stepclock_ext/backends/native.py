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

from .contract import AdamScalars, AdamStates, BackendStatus, SgdScalars
from .layout import Layout, is_dense, real_dtype

__all__ = ["NativeBackend", "load", "status"]

_DTYPE_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


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


class NativeBackend:
    """The contract on ``_C``; threads follow ``torch.get_num_threads()``."""

    name = "cpu"
    watches_addresses = True

    def __init__(self) -> None:
        module = load()
        if module is None:
            raise RuntimeError(f"backend 'cpu': {status().reason}")
        self._c: Any = module
        exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)  # torch >= 2.10
        if exchange is not None:
            module.use_exchange_api(exchange)
        self._grad = module.Column.GRAD
        self._columns = {name: int(column) for name, column in module.Column.__members__.items()}

    def supports(self, tensor: Tensor) -> bool:
        return (
            tensor.device.type == "cpu"
            and tensor.layout == torch.strided
            and real_dtype(tensor.dtype) in _DTYPE_CODES
            and not tensor.is_conj()
            and is_dense(tensor)
        )

    def release(self, layout: Layout, columns: Sequence[str]) -> None:
        bound = layout.cache.get("bound", {})
        for column in columns:
            bound.pop(column, None)
        layout.cache.pop("gathered", None)

    def holds_same(self, dicts: list[dict[str, Any]], key: str, items: list[Any]) -> bool:
        """Whether each dict still holds, under `key`, the very object in `items`."""
        return bool(self._c.holds_same(dicts, key, items))

    def sum_squares_(self, slots: Tensor, tensors: Sequence[Tensor], layout: Layout) -> None:
        table = self._bind(layout, "GRAD", tensors)
        self._c.sum_squares(slots.data_ptr(), table, self._grad, torch.get_num_threads())

    def max_abs_(self, slots: Tensor, tensors: Sequence[Tensor], layout: Layout) -> None:
        table = self._bind(layout, "GRAD", tensors)
        self._c.max_abs(slots.data_ptr(), table, self._grad, torch.get_num_threads())

    def accumulate_(
        self,
        accumulators: Sequence[Tensor],
        slots: Tensor | None,
        grads: Sequence[Tensor],
        layout: Layout,
        *,
        store: bool,
    ) -> None:
        table = self._bind(layout, "ACCUMULATOR", accumulators)
        self._bind(layout, "GRAD", grads)
        address = 0 if slots is None else slots.data_ptr()
        self._c.accumulate(table, store, address, torch.get_num_threads())

    def coefficient_(
        self, stats: Tensor, slots: Tensor, *, divisor: float, max_norm: float, maxima: bool
    ) -> None:
        self._c.coefficient(
            stats.data_ptr(), slots.data_ptr(), slots.numel(), divisor, max_norm, maxima
        )

    def scale_(self, tensors: Sequence[Tensor], stats: Tensor, layout: Layout) -> None:
        table = self._bind(layout, "GRAD", tensors)
        self._c.scale(table, self._grad, _coefficient_address(stats), torch.get_num_threads())

    def adam_(
        self,
        params: Sequence[Tensor],
        states: AdamStates,
        grads: Sequence[Tensor],
        stats: Tensor,
        layout: Layout,
        scalars: AdamScalars,
    ) -> None:
        table = self._bind(layout, "PARAM", params)
        self._send_state_dtypes(table, layout)
        self._bind(layout, "GRAD", grads)
        self._bind(layout, "EXP_AVG", states.exp_avgs)
        self._bind(layout, "EXP_AVG_SQ", states.exp_avg_sqs)
        if states.max_exp_avg_sqs is not None:
            self._bind(layout, "MAX_EXP_AVG_SQ", states.max_exp_avg_sqs)
        self._bind(layout, "STEP", states.steps)
        settings = self._c.AdamScalars(
            lr=scalars.lr,
            beta1=scalars.beta1,
            beta2=scalars.beta2,
            eps=scalars.eps,
            weight_decay=scalars.weight_decay,
            decoupled=scalars.decoupled,
            amsgrad=scalars.amsgrad,
        )
        address, threads = _coefficient_address(stats), torch.get_num_threads()
        self._c.adam(table, settings, address, scalars.maximize, threads)

    def sgd_(
        self,
        params: Sequence[Tensor],
        buffers: Sequence[Tensor] | None,
        grads: Sequence[Tensor],
        stats: Tensor,
        layout: Layout,
        scalars: SgdScalars,
    ) -> None:
        table = self._bind(layout, "PARAM", params)
        self._send_state_dtypes(table, layout)
        self._bind(layout, "GRAD", grads)
        if buffers is not None:
            self._bind(layout, "BUFFER", buffers)
        settings = self._c.SgdScalars(
            lr=scalars.lr,
            momentum=scalars.momentum if buffers is not None else 0.0,
            dampening=scalars.dampening,
            weight_decay=scalars.weight_decay,
            nesterov=scalars.nesterov,
            first=scalars.first,
        )
        address, threads = _coefficient_address(stats), torch.get_num_threads()
        self._c.sgd(table, settings, address, scalars.maximize, threads)

    def gather_gradients(self, params: list[Tensor], layout: Layout) -> list[Tensor] | None:
        """Each parameter's gradient, if all are there and fit `layout` as they are."""
        grads: list[Tensor] | None = self._table(layout).gather_gradients(params)
        if grads is not None:
            layout.cache["gathered"] = (params, grads)
        return grads

    def _send_state_dtypes(self, table: Any, layout: Layout) -> None:
        if not layout.cache.get("states_sent"):
            table.set_state_dtypes([_DTYPE_CODES[dtype] for dtype in layout.state_dtypes])
            layout.cache["states_sent"] = True

    def _table(self, layout: Layout) -> Any:
        table = layout.cache.get(self.name)
        if table is None:
            codes = [_DTYPE_CODES[dtype] for dtype in layout.dtypes]
            table = self._c.Table(list(layout.num_elements), codes, list(layout.first_slots))
            layout.cache[self.name] = table
        return table

    def _bind(self, layout: Layout, column: str, tensors: Sequence[Tensor]) -> Any:
        """Points a column of the layout's table at `tensors`; returns the table."""
        table = self._table(layout)
        if any(tensors is gathered for gathered in layout.cache.get("gathered", ())):
            return table
        bound = layout.cache.setdefault("bound", {})
        same_list = bound.pop(column, None) is tensors
        listed = tensors if isinstance(tensors, list) else list(tensors)
        moved = table.bind(self._columns[column], listed)
        if moved and same_list:  # t.data was replaced under us
            layout.verified.pop(column, None)
            layout.verify(column, tensors)
        bound[column] = tensors
        return table


def _coefficient_address(stats: Tensor) -> int:
    return stats.data_ptr() + stats.element_size()
