"""The kernel contract: each op checks its tensors and hands them to one backend.

An op writes the arguments that come first. ``slots`` is fp64, shape (layout.num_slots,) or more;
``stats`` is fp64, shape (3,): the norm before the clip, the coefficient, the clip factor. Both are
on the tensors' device; no op waits for the host; the number of threads changes no bit.

Example:
    >>> import torch
    >>> grads = [torch.tensor([3.0]), torch.tensor([4.0])]
    >>> layout = Layout.of(make_backend("auto"), grads)
    >>> slots, stats = make_slots(layout.num_slots), make_stats()
    >>> sum_squares_(slots, grads, layout)
    >>> coefficient_(stats, slots, layout, divisor=1.0, max_norm=1.0)
    >>> [round(value, 4) for value in stats.tolist()]
    [5.0, 0.2, 0.2]
    >>> scale_(grads, stats, layout)
    >>> [round(g.item(), 4) for g in grads]
    [0.6, 0.8]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .backends import backends, make_backend
from .backends.contract import (
    AdamScalars,
    AdamStates,
    Backend,
    BackendStatus,
    SgdScalars,
    clip_factor,
)
from .backends.layout import (
    CHUNK_ELEMENTS,
    Layout,
    chunk_sizes,
    num_chunks,
    num_real,
    real_view,
)

__all__ = [
    "CHUNK_ELEMENTS",
    "AdamScalars",
    "AdamStates",
    "Backend",
    "BackendStatus",
    "Layout",
    "SgdScalars",
    "accumulate_",
    "adam_",
    "backends",
    "chunk_sizes",
    "clip_factor",
    "coefficient_",
    "gather_gradients",
    "holds_same",
    "make_backend",
    "make_slots",
    "make_stats",
    "max_abs_",
    "num_chunks",
    "num_real",
    "real_view",
    "scale_",
    "sgd_",
    "sum_squares_",
]


def gather_gradients(params: list[Tensor], layout: Layout) -> list[Tensor] | None:
    """The gradients of contiguous `params`, if each is there and fits its row as it is.

    One visit to each tensor instead of one for every question; None where there is no such
    shortcut, or where a gradient is missing, strided otherwise, or of another dtype.
    """
    grads = layout.backend.gather_gradients(params, layout)
    if grads is not None:
        layout.verified["GRAD"] = grads
    return grads


def holds_same(
    backend: Backend, dicts: list[dict[str, Any]], key: str, items: list[Tensor]
) -> bool:
    """Whether each dict still holds, under `key`, the very tensor in `items`."""
    native = getattr(backend, "holds_same", None)
    if native is not None:
        return bool(native(dicts, key, items))
    return all(state.get(key) is item for state, item in zip(dicts, items, strict=True))


def make_slots(num_slots: int, device: torch.device | str = "cpu") -> Tensor:
    """Zeroed slots, fp64, shape (num_slots,)."""
    return torch.zeros(num_slots, dtype=torch.float64, device=device)


def make_stats(device: torch.device | str = "cpu") -> Tensor:
    """The stats of a window that needs no correction: norm 0, coefficient 1, clip factor 1."""
    return torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64, device=device)


def sum_squares_(slots: Tensor, tensors: Sequence[Tensor], layout: Layout) -> None:
    """Writes each chunk's sum of squares into its slot.

    Products of values below fp64 are exact, so a finite value is never taken for an overflow; a
    NaN or infinity anywhere in the chunk makes its slot NaN or infinite.

    Args:
        slots: fp64, at least ``layout.num_slots`` long; slots of other rows are left alone.
        tensors: floating point or complex, as `layout` says.
        layout: made of `tensors`, or of tensors like them.

    Raises:
        TypeError: a tensor has another size or dtype than its row.
        ValueError: a tensor has other strides than its row, or `slots` is too short.
    """
    _check_slots(slots, layout)
    layout.verify("GRAD", tensors)
    layout.backend.sum_squares_(slots, tensors, layout)


def max_abs_(slots: Tensor, tensors: Sequence[Tensor], layout: Layout) -> None:
    """Writes each chunk's largest magnitude into its slot, NaN where one is in the chunk.

    Arguments and errors as for `sum_squares_`. The magnitude of a complex value is taken part by
    part, which finds every NaN and infinity; `max_abs_` of complex tensors is no infinity norm.
    """
    _check_slots(slots, layout)
    layout.verify("GRAD", tensors)
    layout.backend.max_abs_(slots, tensors, layout)


def accumulate_(
    accumulators: Sequence[Tensor],
    grads: Sequence[Tensor],
    layout: Layout,
    *,
    slots: Tensor | None = None,
    store: bool = False,
) -> None:
    """Adds `grads` to `accumulators`, and with `slots` also writes the sums of squares.

    Args:
        accumulators: as `layout` says.
        grads: as `layout` says.
        layout: of both.
        slots: gets each chunk's sum of squares of the new accumulator, in the same pass.
        store: overwrite the accumulators instead of adding: the first micro step of a window.

    Raises:
        TypeError, ValueError: as `sum_squares_`.
    """
    if slots is not None:
        _check_slots(slots, layout)
    layout.verify("ACCUMULATOR", accumulators)
    layout.verify("GRAD", grads)
    layout.backend.accumulate_(accumulators, slots, grads, layout, store=store)


def coefficient_(
    stats: Tensor,
    slots: Tensor,
    layout: Layout,
    *,
    divisor: float,
    max_norm: float,
    maxima: bool = False,
) -> None:
    """Writes norm, coefficient and clip factor of a window into `stats`.

    ``norm = sqrt(sum(slots)) / divisor`` (or ``max(slots) / divisor``), ``clip = min(1, max_norm /
    (norm + 1e-6))`` as in ``torch.nn.utils.clip_grad_norm_``, ``coefficient = clip / divisor``.

    Args:
        stats: fp64, shape (3,).
        slots: added in index order, all of them.
        layout: names the backend.
        divisor: loss scale times total weight.
        max_norm: infinity for no clip.
        maxima: the slots are magnitudes from `max_abs_`.
    """
    _check_stats(stats)
    _check_doubles("slots", slots, 0)
    layout.backend.coefficient_(stats, slots, divisor=divisor, max_norm=max_norm, maxima=maxima)


def scale_(tensors: Sequence[Tensor], stats: Tensor, layout: Layout) -> None:
    """Multiplies `tensors` by the coefficient in `stats`."""
    _check_stats(stats)
    layout.verify("GRAD", tensors)
    layout.backend.scale_(tensors, stats, layout)


def adam_(
    params: Sequence[Tensor],
    states: AdamStates,
    grads: Sequence[Tensor],
    stats: Tensor,
    layout: Layout,
    scalars: AdamScalars,
) -> None:
    """One update of Adam or AdamW with ``coefficient * grads``; adds 1 to each step.

    Kingma & Ba 2015; decoupled decay of Loshchilov & Hutter 2019; amsgrad of Reddi et al. 2018.

    Args:
        params: written; as `layout` says.
        states: written; moments as `layout` says, steps fp32 scalars.
        grads: window sums, read.
        stats: holds the coefficient.
        layout: of params, moments and grads.
        scalars: the settings.

    Raises:
        TypeError, ValueError: as `sum_squares_`.
    """
    _check_stats(stats)
    layout.verify("PARAM", params)
    layout.verify("GRAD", grads)
    layout.verify("STEP", states.steps)
    layout.verify("EXP_AVG", states.exp_avgs)
    layout.verify("EXP_AVG_SQ", states.exp_avg_sqs)
    if states.max_exp_avg_sqs is not None:
        layout.verify("MAX_EXP_AVG_SQ", states.max_exp_avg_sqs)
    layout.backend.adam_(params, states, grads, stats, layout, scalars)


def sgd_(
    params: Sequence[Tensor],
    buffers: Sequence[Tensor] | None,
    grads: Sequence[Tensor],
    stats: Tensor,
    layout: Layout,
    scalars: SgdScalars,
) -> None:
    """One update of SGD with ``coefficient * grads``.

    Momentum as ``torch.optim.SGD`` (Sutskever et al. 2013 with the learning rate outside the
    buffer). Arguments and errors as for `adam_`; `buffers` is None without momentum.
    """
    _check_stats(stats)
    layout.verify("PARAM", params)
    layout.verify("GRAD", grads)
    if buffers is not None:
        layout.verify("BUFFER", buffers)
    layout.backend.sgd_(params, buffers, grads, stats, layout, scalars)


def _check_slots(slots: Tensor, layout: Layout) -> None:
    num_slots = layout.cache.get("num_slots")
    if num_slots is None:
        num_slots = layout.cache["num_slots"] = layout.num_slots
    _check_doubles("slots", slots, num_slots)


def _check_stats(stats: Tensor) -> None:
    _check_doubles("stats", stats, 3)


def _check_doubles(name: str, tensor: Tensor, at_least: int) -> None:
    """Kernels write these through their address."""
    if tensor.dtype == torch.float64 and tensor.is_contiguous() and tensor.numel() >= at_least:
        return
    raise ValueError(
        f"{name} must be fp64, contiguous, {at_least} elements or more, got {tensor.dtype}, "
        f"strides {tensor.stride()}, {tensor.numel()} elements"
    )
