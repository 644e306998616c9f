"""What a backend must offer, and the values that travel with every op."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .layout import Layout

__all__ = [
    "AccumulateSlots",
    "AdamScalars",
    "AdamStates",
    "Backend",
    "BackendStatus",
    "Companions",
    "SgdScalars",
    "clip_factor",
]


@dataclass(frozen=True)
class BackendStatus:
    """Whether a backend can be used here, and why not."""

    available: bool
    reason: str


@dataclass(frozen=True)
class AdamScalars:
    """Settings of one update of Adam or AdamW, named as in ``torch.optim``."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    amsgrad: bool
    maximize: bool


@dataclass(frozen=True)
class SgdScalars:
    """Settings of one update of SGD; `first` stores the momentum buffer instead of moving it."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool
    first: bool


class Backend(Protocol):
    """The kernel contract. `reference.py` is its specification; every other backend must agree.

    Arguments that an op writes come first. `layout` describes every list of tensors of the call;
    `slots` is fp64, shape (num_slots,); `stats` is fp64, shape (3,): norm before the clip,
    coefficient, clip factor. Both live on the tensors' device, and no op waits for the host.
    """

    name: str
    device: torch.device  # of slots and stats
    settles_late: bool  # its ops run on while the host goes on
    watches_addresses: bool  # it checks a list again when one of its tensors has moved

    def supports(self, tensor: Tensor) -> bool:
        """Whether ops here take `tensor` (device, dtype, memory layout)."""
        ...

    def release(self, layout: Layout, columns: Sequence[str]) -> None:
        """Lets go of the tensors of `columns`."""
        ...

    def gather_params(self, params: list[Tensor], layout: Layout) -> bool:
        """Whether each of `params`, all contiguous, was seen to fit its row as it is.

        A shortcut; False says nothing about them.
        """
        ...

    def gather_gradients(self, params: list[Tensor], layout: Layout) -> list[Tensor] | None:
        """The gradients of contiguous `params`, if each is there and fits its row as it is.

        A shortcut; None says nothing about them.
        """
        ...

    def sum_squares_(self, slots: Tensor, tensors: Sequence[Tensor], layout: Layout) -> None:
        """Each chunk's sum of squares into its slot."""
        ...

    def max_abs_(self, slots: Tensor, tensors: Sequence[Tensor], layout: Layout) -> None:
        """Each chunk's largest magnitude into its slot; NaN where one is in the chunk."""
        ...

    def accumulate_(
        self,
        accumulators: Sequence[Tensor],
        slots: AccumulateSlots,
        grads: Sequence[Tensor],
        layout: Layout,
        *,
        store: bool,
    ) -> None:
        """Adds `grads` (or stores them), and writes the sums of squares that are asked for."""
        ...

    def coefficient_(
        self, stats: Tensor, slots: Tensor, *, divisor: float, max_norm: float, maxima: bool
    ) -> None:
        """Norm, coefficient and clip factor from the slots, added in index order."""
        ...

    def scale_(self, tensors: Sequence[Tensor], stats: Tensor, layout: Layout) -> None:
        """Multiplies `tensors` by the coefficient in `stats`."""
        ...

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
        """One Adam or AdamW update; adds 1 to each step."""
        ...

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
        """One SGD update; `buffers` is None without momentum."""
        ...

    def move_average_(
        self, params: Sequence[Tensor], stats: Tensor, layout: Layout, companions: Companions
    ) -> None:
        """Moves the averages of parameters that an update passed by."""
        ...


@dataclass(frozen=True, eq=False)
class AccumulateSlots:
    """Where an accumulation writes its sums of squares, chunk by chunk; None where not wanted.

    Attributes:
        sums: of the accumulator as it is then.
        grad_sums: of the gradient alone.
        prior_sums: of the accumulator as it was; 0 where it is stored.
    """

    sums: Tensor | None = None
    grad_sums: Tensor | None = None
    prior_sums: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Companions:
    """What moves along with the parameters of an update.

    Attributes:
        masters: one a row: int16 remainders of a bf16 parameter (`rounding.split`), an fp32 copy of
            an fp16 one; what stands beside any other is not used. None: no masters.
        averages: averaged weights, one a row, fp32 beside 16-bit parameters and else of their
            dtype; they average the masters where there are some. None: no averages.
        average_weight: ``average += average_weight * (parameter - average)``, after the update.
            Where the two are equal nothing moves: an infinity stays one.
        rounding_key: 16-bit parameters without masters are rounded stochastically by the random
            bits of this key, from 0 to below 2**64; None rounds to nearest.
        is_gated: the update does nothing at all where the norm in ``stats`` is not finite. So a
            skip needs no host that looks at the norm first.
    """

    masters: Sequence[Tensor] | None = None
    averages: Sequence[Tensor] | None = None
    average_weight: float = 0.0
    rounding_key: int | None = None
    is_gated: bool = False


@dataclass(frozen=True, eq=False)
class AdamStates:
    """Adam's state tensors, one a row, as ``torch.optim.Adam`` names them.

    `steps` are fp32 scalars; `max_exp_avg_sqs` is None without amsgrad.
    """

    steps: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    max_exp_avg_sqs: list[Tensor] | None


def clip_factor(norm: float, max_norm: float) -> float:
    """``min(1, max_norm / (norm + 1e-6))``, torch's rule; a NaN norm gives a NaN factor.

    >>> clip_factor(5.0, math.inf), round(clip_factor(5.0, 1.0), 6)
    (1.0, 0.2)
    """
    if math.isinf(max_norm):
        return 1.0
    ratio = max_norm / (norm + 1e-6)
    return 1.0 if ratio >= 1.0 else ratio
