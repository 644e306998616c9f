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

from torch import Tensor

from .backends import backends, make_backend
from .backends.contract import (
    AccumulateSlots,
    AdamScalars,
    AdamStates,
    Backend,
    BackendStatus,
    Companions,
    SgdScalars,
    clip_factor,
)
from .backends.layout import (
    CHUNK_ELEMENTS,
    HALVES,
    Layout,
    chunk_sizes,
    num_chunks,
    num_real,
    real_dtype,
    real_view,
)
from .backends.numbers import check_doubles, check_slots, check_stats, make_slots, make_stats
from .backends.rounding import join, round_stochastically, split, update_key
from .backends.shortcuts import gather_gradients, gather_params, holds_same

_NO_COMPANIONS = Companions()

__all__ = [
    "CHUNK_ELEMENTS",
    "HALVES",
    "AccumulateSlots",
    "AdamScalars",
    "AdamStates",
    "Backend",
    "BackendStatus",
    "Companions",
    "Layout",
    "SgdScalars",
    "accumulate_",
    "adam_",
    "backends",
    "chunk_sizes",
    "clip_factor",
    "coefficient_",
    "gather_gradients",
    "gather_params",
    "holds_same",
    "join",
    "make_backend",
    "make_slots",
    "make_stats",
    "max_abs_",
    "move_average_",
    "num_chunks",
    "num_real",
    "real_dtype",
    "real_view",
    "round_stochastically",
    "scale_",
    "sgd_",
    "split",
    "sum_squares_",
    "update_key",
]


def sum_squares_(slots: Tensor, tensors: Sequence[Tensor], layout: Layout) -> None:
    """Writes each chunk's sum of squares into its slot.

    Products of values below fp64 are exact, so a finite value is never taken for an overflow; a
    NaN or infinity anywhere in the chunk makes its slot NaN or infinite.

    Args:
        slots: fp64, at least ``layout.num_slots`` long; slots of other rows are left alone.
        tensors: window sums, floating point or complex, as `layout` says.
        layout: made of `tensors`, or of tensors like them.

    Raises:
        TypeError: a tensor has another size or dtype than its row.
        ValueError: a tensor has other strides than its row, or `slots` is too short.
    """
    check_slots(slots, layout)
    layout.verify("ACCUMULATOR", tensors)
    layout.backend.sum_squares_(slots, tensors, layout)


def max_abs_(slots: Tensor, tensors: Sequence[Tensor], layout: Layout) -> None:
    """Writes each chunk's largest magnitude into its slot, NaN where one is in the chunk.

    Arguments and errors as for `sum_squares_`. The magnitude of a complex value is taken part by
    part, which finds every NaN and infinity; `max_abs_` of complex tensors is no infinity norm.
    """
    check_slots(slots, layout)
    layout.verify("ACCUMULATOR", tensors)
    layout.backend.max_abs_(slots, tensors, layout)


def accumulate_(
    accumulators: Sequence[Tensor],
    grads: Sequence[Tensor],
    layout: Layout,
    *,
    slots: Tensor | None = None,
    grad_slots: Tensor | None = None,
    prior_slots: Tensor | None = None,
    store: bool = False,
) -> None:
    """Adds `grads` to `accumulators`, and in the same pass writes sums of squares.

    Args:
        accumulators: as `layout` says: of the gradients' dtype, or fp32 beside 16 bits.
        grads: one micro step's, as `layout` says.
        layout: of both.
        slots: gets each chunk's sum of squares of the new accumulator.
        grad_slots: gets those of the gradients alone.
        prior_slots: gets those of the accumulators as they were; 0 where `store` is set.
        store: overwrite the accumulators instead of adding: the first micro step of a window.

    Raises:
        TypeError, ValueError: as `sum_squares_`.
    """
    into = AccumulateSlots(slots, grad_slots, prior_slots)
    for wanted in (slots, grad_slots, prior_slots):
        if wanted is not None:
            check_slots(wanted, layout)
    layout.verify("ACCUMULATOR", accumulators)
    layout.verify("GRAD", grads)
    layout.backend.accumulate_(accumulators, into, grads, layout, store=store)


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
    check_stats(stats)
    check_doubles("slots", slots, 0)
    layout.backend.coefficient_(stats, slots, divisor=divisor, max_norm=max_norm, maxima=maxima)


def scale_(tensors: Sequence[Tensor], stats: Tensor, layout: Layout) -> None:
    """Multiplies `tensors`, window sums, by the coefficient in `stats`."""
    check_stats(stats)
    layout.verify("ACCUMULATOR", tensors)
    layout.backend.scale_(tensors, stats, layout)


def adam_(
    params: Sequence[Tensor],
    states: AdamStates,
    sums: Sequence[Tensor],
    stats: Tensor,
    layout: Layout,
    scalars: AdamScalars,
    companions: Companions = _NO_COMPANIONS,
) -> None:
    """One update of Adam or AdamW with ``coefficient * sums``; adds 1 to each step.

    Kingma & Ba 2015; decoupled decay of Loshchilov & Hutter 2019; amsgrad of Reddi et al. 2018.

    Args:
        params: written; as `layout` says.
        states: written; moments as `layout` says, steps fp32 scalars.
        sums: the window's, read.
        stats: holds the coefficient.
        layout: of params, moments and sums.
        scalars: the settings.
        companions: written; masters and averages that move in the same pass, and the rounding.

    Raises:
        TypeError, ValueError: as `sum_squares_`.
    """
    check_stats(stats)
    layout.verify("PARAM", params)
    layout.verify("ACCUMULATOR", sums)
    layout.verify("STEP", states.steps)
    layout.verify("EXP_AVG", states.exp_avgs)
    layout.verify("EXP_AVG_SQ", states.exp_avg_sqs)
    if states.max_exp_avg_sqs is not None:
        layout.verify("MAX_EXP_AVG_SQ", states.max_exp_avg_sqs)
    _verify_companions(companions, layout)
    layout.backend.adam_(params, states, sums, stats, layout, scalars, companions)


def sgd_(
    params: Sequence[Tensor],
    buffers: Sequence[Tensor] | None,
    sums: Sequence[Tensor],
    stats: Tensor,
    layout: Layout,
    scalars: SgdScalars,
    companions: Companions = _NO_COMPANIONS,
) -> None:
    """One update of SGD with ``coefficient * sums``.

    Momentum as ``torch.optim.SGD`` (Sutskever et al. 2013 with the learning rate outside the
    buffer). Arguments and errors as for `adam_`; `buffers` is None without momentum.
    """
    check_stats(stats)
    layout.verify("PARAM", params)
    layout.verify("ACCUMULATOR", sums)
    if scalars.momentum == 0.0:
        buffers = None
    if buffers is not None:
        layout.verify("BUFFER", buffers)
    _verify_companions(companions, layout)
    layout.backend.sgd_(params, buffers, sums, stats, layout, scalars, companions)


def move_average_(
    params: Sequence[Tensor], stats: Tensor, layout: Layout, companions: Companions
) -> None:
    """Moves the averages of parameters that no fused update moves.

    Args:
        params: read; as `layout` says.
        stats: holds the norm, for a gated move.
        layout: of params, masters and averages.
        companions: `averages` are written, `masters` are read.

    Raises:
        TypeError, ValueError: as `sum_squares_`.
    """
    if companions.averages is None:
        raise ValueError("move_average_: companions must hold averages, got None")
    check_stats(stats)
    layout.verify("PARAM", params)
    _verify_companions(companions, layout)
    layout.backend.move_average_(params, stats, layout, companions)


def _verify_companions(companions: Companions, layout: Layout) -> None:
    if companions.masters is not None:
        layout.verify("MASTER", companions.masters)
    if companions.averages is not None:
        layout.verify("AVERAGE", companions.averages)
    key = companions.rounding_key
    if key is not None and not 0 <= key < 2**64:
        raise ValueError(f"rounding_key must be from 0 to below 2**64, got {key}; see update_key()")
