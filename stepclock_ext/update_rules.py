"""Update rules: AdamW, Adam and SGD as one fused pass on the optimizer's own state tensors.

The state stays what torch would have made of it, to key, shape and dtype, so that the inner
optimizer's ``state_dict`` is the same with us and without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from . import ops
from .parameters import ParameterRows

__all__ = ["RULES", "BoundGroup", "Rule"]

Rows = tuple[int, ...]


@dataclass(eq=False)
class BoundGroup:
    """A group's parameters and state tensors as lists, for one set of present gradients."""

    rows: tuple[int, ...]
    layout: ops.Layout
    params: list[Tensor]
    dicts: list[dict[str, Any]]
    columns: dict[str, list[Tensor]]
    first: bool = False  # SGD: the momentum buffers are not filled yet
    # Generation, masters and averages, as `companions.py` last found them.
    companions: tuple[Any, list[Tensor] | None, list[Tensor] | None] | None = None

    def is_current(self, keys: list[str]) -> bool:
        """Whether the state dicts still hold these very tensors, under these keys."""
        if self.first or keys != list(self.columns):
            return False
        return all(
            ops.holds_same(self.layout.backend, self.dicts, key, column)
            for key, column in self.columns.items()
        )


class Rule(Protocol):
    def keys(self, group: dict[str, Any]) -> list[str]: ...

    def bind(
        self, inner: Optimizer, group: dict[str, Any], rows: ParameterRows, group_rows: Rows
    ) -> list[BoundGroup] | None: ...

    def run(
        self,
        group: dict[str, Any],
        bound: BoundGroup,
        sums: list[Tensor],
        stats: Tensor,
        companions: ops.Companions,
    ) -> None: ...


class AdamRule:
    """Adam and AdamW; a group of an older torch does not say which of them it is."""

    def __init__(self, *, decoupled: bool) -> None:
        self.decoupled = decoupled

    def keys(self, group: dict[str, Any]) -> list[str]:
        return ["step", "exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * bool(group["amsgrad"])

    def bind(
        self, inner: Optimizer, group: dict[str, Any], rows: ParameterRows, group_rows: Rows
    ) -> list[BoundGroup] | None:
        params = rows.of(group_rows)
        dicts = [inner.state[p] for p in params]
        for row, p, state in zip(group_rows, params, dicts, strict=True):
            if not state:
                _start_adam(state, p, group, rows.state_dtype(row))
            if row in rows.walked:
                _bring_step(state, rows.backend.device)
        columns = {key: [state[key] for state in dicts] for key in self.keys(group)}
        return _fitting([BoundGroup(group_rows, rows.layout(group_rows), params, dicts, columns)])

    def run(
        self,
        group: dict[str, Any],
        bound: BoundGroup,
        sums: list[Tensor],
        stats: Tensor,
        companions: ops.Companions,
    ) -> None:
        beta1, beta2 = group["betas"]
        scalars = ops.AdamScalars(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled=bool(group.get("decoupled_weight_decay", self.decoupled)),
            amsgrad=bool(group["amsgrad"]),
            maximize=bool(group["maximize"]),
        )
        columns = bound.columns
        states = ops.AdamStates(
            columns["step"],
            columns["exp_avg"],
            columns["exp_avg_sq"],
            columns.get("max_exp_avg_sq"),
        )
        ops.adam_(bound.params, states, sums, stats, bound.layout, scalars, companions)


class SgdRule:
    """SGD. A momentum buffer is made by its first update, as torch does."""

    def keys(self, group: dict[str, Any]) -> list[str]:
        return ["momentum_buffer"] * (group["momentum"] != 0)

    def bind(
        self, inner: Optimizer, group: dict[str, Any], rows: ParameterRows, group_rows: Rows
    ) -> list[BoundGroup] | None:
        if group["momentum"] == 0:
            params = rows.of(group_rows)
            return _fitting([BoundGroup(group_rows, rows.layout(group_rows), params, [], {})])
        started = {row for row in group_rows if _buffer(inner, rows.params[row]) is not None}
        parts = [
            tuple(row for row in group_rows if (row in started) == old) for old in (True, False)
        ]
        return _fitting(
            [self._bind_part(inner, rows, part, part[0] not in started) for part in parts if part]
        )

    def _bind_part(
        self, inner: Optimizer, rows: ParameterRows, part: Rows, first: bool
    ) -> BoundGroup:
        """Rows whose buffers are all filled, or all to be made by this update."""
        params = rows.of(part)
        dicts = [inner.state[p] for p in params]
        if first:
            buffers = [
                torch.empty_like(p, dtype=rows.state_dtype(row), requires_grad=False)
                for row, p in zip(part, params, strict=True)
            ]
        else:
            buffers = [state["momentum_buffer"] for state in dicts]
        columns = {"momentum_buffer": buffers}
        return BoundGroup(part, rows.layout(part), params, dicts, columns, first)

    def run(
        self,
        group: dict[str, Any],
        bound: BoundGroup,
        sums: list[Tensor],
        stats: Tensor,
        companions: ops.Companions,
    ) -> None:
        scalars = ops.SgdScalars(
            lr=float(group["lr"]),
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            weight_decay=float(group["weight_decay"]),
            nesterov=bool(group["nesterov"]),
            maximize=bool(group["maximize"]),
            first=bound.first,
        )
        buffers = bound.columns.get("momentum_buffer")
        ops.sgd_(bound.params, buffers, sums, stats, bound.layout, scalars, companions)
        if bound.first and buffers is not None:  # filled now, and not before
            for state, buffer in zip(bound.dicts, buffers, strict=True):
                state["momentum_buffer"] = buffer


# Exact types: a subclass may do anything in its step.
RULES: dict[type, Rule] = {
    Adam: AdamRule(decoupled=False),
    AdamW: AdamRule(decoupled=True),
    SGD: SgdRule(),
}

_COLUMN_OF = {
    "step": "STEP",
    "exp_avg": "EXP_AVG",
    "exp_avg_sq": "EXP_AVG_SQ",
    "max_exp_avg_sq": "MAX_EXP_AVG_SQ",
    "momentum_buffer": "BUFFER",
}


def _buffer(inner: Optimizer, p: Tensor) -> Tensor | None:
    """The momentum buffer of `p`, if it has one; makes no state."""
    buffer: Tensor | None = inner.state.get(p, {}).get("momentum_buffer")
    return buffer


def _fitting(parts: list[BoundGroup]) -> list[BoundGroup] | None:
    """`parts`, or None where a loaded or replaced state does not lie like its parameter."""
    try:
        for bound in parts:
            bound.layout.verify("PARAM", bound.params)
            moments = [tensors for key, tensors in bound.columns.items() if key != "step"]
            if moments and all(isinstance(t, Tensor) for t in moments[0]):
                bound.layout.adopt_state_dtypes(moments[0])
            for key, tensors in bound.columns.items():
                if not all(isinstance(t, Tensor) for t in tensors):
                    return None
                bound.layout.verify(_COLUMN_OF[key], tensors)
    except (TypeError, ValueError):
        return None
    return parts


def _bring_step(state: dict[str, Any], device: torch.device) -> None:
    """torch keeps steps on the CPU; kernels that run on a GPU count them there."""
    step = state.get("step")
    if device.type != "cpu" and isinstance(step, Tensor) and step.device != device:
        state["step"] = step.to(device)


def _start_adam(
    state: dict[str, Any], p: Tensor, group: dict[str, Any], moment_dtype: torch.dtype
) -> None:
    """The state that ``torch.optim.Adam`` begins with; `moment_dtype` is as the rows say."""
    dtype = torch.float32
    if not group["fused"] and torch.get_default_dtype() == torch.float64:
        dtype = torch.float64
    state["step"] = torch.zeros((), dtype=dtype)
    for key in ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * group["amsgrad"]:
        state[key] = torch.zeros_like(p, dtype=moment_dtype, requires_grad=False)
