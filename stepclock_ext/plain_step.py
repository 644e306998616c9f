"""The inner optimizer's own ``step()``, on true gradients in ``.grad``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from . import ops
from .norm import Measurement
from .parameters import ParameterRows
from .window_gradients import WindowGradients

__all__ = [
    "apply_in_place",
    "hand_over",
    "has_own_step",
    "has_step_hooks",
    "refuse_misfit",
    "run_step",
]


def run_step(
    inner: Optimizer,
    rows: ParameterRows,
    groups: Sequence[tuple[int, ...]],
    gradients: WindowGradients,
    measurement: Measurement,
) -> None:
    """Steps `inner`; the coefficient goes in by its ``grad_scale`` hook, or in place before it.

    Args:
        inner: the optimizer.
        rows: the parameters.
        groups: rows with a gradient in each of its groups.
        gradients: the window's sums; written.
        measurement: holds the coefficient.
    """
    coefficient = measurement.coefficient
    among = list(chain.from_iterable(groups))
    by_scale = coefficient != 1.0 and not gradients.odd and not rows.wide
    if (
        by_scale
        and not has_step_hooks(inner)
        and _takes_grad_scale(inner, rows, groups, coefficient)
    ):
        hand_over(rows, gradients, among)
        _step_with_grad_scale(inner, coefficient)
        return
    apply_in_place(rows, gradients, measurement, among)
    hand_over(rows, gradients, among)
    inner.step()


def has_step_hooks(inner: Optimizer) -> bool:
    return bool(
        inner._optimizer_step_pre_hooks
        or inner._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )


def apply_in_place(
    rows: ParameterRows,
    gradients: WindowGradients,
    measurement: Measurement,
    among: Iterable[int] | None = None,
) -> None:
    """Turns sums into gradients where they lie; nothing to do where the coefficient is 1.

    Args:
        rows: the parameters.
        gradients: the window's sums; written.
        measurement: holds the coefficient.
        among: only these rows; None for all.
    """
    if measurement.coefficient == 1.0:
        return
    walked, odd = gradients.walked, gradients.odd
    if among is not None:
        chosen = set(among)
        walked = tuple(row for row in walked if row in chosen)
        odd = tuple(row for row in odd if row in chosen)
    if walked:
        layout, grads = rows.layout(walked), gradients.of(walked)
        layout.verified["ACCUMULATOR"] = grads  # collect() made them fit
        ops.scale_(grads, measurement.stats, layout)
        torch.autograd.graph.increment_version(grads)
    for row in odd:
        grad = gradients.grads[row]
        assert grad is not None
        (grad.values() if grad.is_sparse else grad).detach().mul_(measurement.coefficient)


def hand_over(rows: ParameterRows, gradients: WindowGradients, among: Iterable[int]) -> None:
    """Puts gradients that lie elsewhere into ``.grad``, in the parameter's dtype."""
    for row in among:
        p, grad = rows.params[row], gradients.grads[row]
        if grad is not None and p.grad is None:
            p.grad = grad.to(p.dtype)


def refuse_misfit(
    inner: Optimizer,
    rows: ParameterRows,
    group_rows: tuple[int, ...],
    names: Sequence[str],
    *,
    fused: bool | None,
) -> None:
    """Refuses a state that torch's own step would overrun, or stop at half way.

    Its fused kernels pair memory blindly; its Adam takes no wider state beside 16 bits.
    """
    for row in group_rows:
        p = rows.params[row]
        for key, value in inner.state.get(p, {}).items():
            if not isinstance(value, Tensor) or key == "step":
                continue
            if not fused and (value.dtype == p.dtype or p.dtype not in ops.HALVES):
                continue
            if (value.shape, value.dtype, value.stride()) != (p.shape, p.dtype, p.stride()):
                raise TypeError(
                    f"ClockedOptimizer: {key!r} of {names[row]!r} must be {tuple(p.shape)} "
                    f"{p.dtype} with strides {p.stride()}, as its parameter is now, got "
                    f"{tuple(value.shape)} "
                    f"{value.dtype} with strides {value.stride()}; build the optimizer anew after "
                    "changing a parameter's data"
                )


def has_own_step(inner: Optimizer) -> bool:
    """Whether ``inner.step`` is its class's, bare or as torch's schedulers wrap it."""
    patched = inner.__dict__.get("step")
    return patched is None or getattr(patched, "__wrapped__", None) is type(inner).step


def _takes_grad_scale(
    inner: Optimizer, rows: ParameterRows, groups: Sequence[tuple[int, ...]], coefficient: float
) -> bool:
    """torch's fused optimizers divide by ``grad_scale`` themselves, as ``GradScaler`` uses it.

    It is an fp32 value there: too coarse for fp64, and of no use where the coefficient has no
    finite reciprocal.
    """
    if not type(inner).__module__.startswith("torch.optim") or not has_own_step(inner):
        return False
    if not getattr(inner, "_step_supports_amp_scaling", False):
        return False
    if not all(group.get("fused") for group in inner.param_groups):
        return False
    narrow = all(rows.dtypes[row].itemsize <= 4 for group in groups for row in group)
    return narrow and 1e-37 < coefficient < math.inf


def _step_with_grad_scale(inner: Optimizer, coefficient: float) -> None:
    scaled: Any = inner
    scaled.grad_scale = torch.tensor(1.0 / coefficient, dtype=torch.float32)
    scaled.found_inf = torch.tensor(0.0, dtype=torch.float32)
    try:
        inner.step()
    finally:
        del scaled.grad_scale, scaled.found_inf
