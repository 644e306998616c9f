"""The specification: every op of the contract in plain PyTorch, on any device.

Tensor by tensor and without cleverness. 16-bit values are widened to fp32, worked on, and rounded
once; fp64 stays fp64; complex tensors are pairs of real numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .contract import AccumulateSlots, AdamScalars, AdamStates, Companions, SgdScalars
from .layout import CHUNK_ELEMENTS, HALVES, Layout, is_dense, num_chunks, real_view
from .rounding import chunk_key, join, random_bits, round_stochastically, split

__all__ = ["ReferenceBackend"]


def _wide(tensor: Tensor) -> Tensor:
    """The real numbers of `tensor` in the dtype that arithmetic runs in."""
    real = real_view(tensor.detach())
    return real if real.dtype == torch.float64 else real.to(torch.float32)


def _flat(tensor: Tensor) -> Tensor:
    """The real numbers of `tensor` in memory order, where memory has one."""
    real = real_view(tensor.detach())
    order = sorted(range(real.dim()), key=real.stride, reverse=True)
    return real.permute(order).reshape(-1)


class ReferenceBackend:
    """Plain PyTorch; slow, and right by inspection."""

    name = "reference"
    device = torch.device("cpu")  # slots and stats stay here, wherever the tensors are
    settles_late = False
    watches_addresses = False

    def supports(self, tensor: Tensor) -> bool:
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_conj():
            return False
        return is_dense(tensor)

    def release(self, layout: Layout, columns: Sequence[str]) -> None:
        """Nothing is kept between ops."""

    def gather_params(self, params: list[Tensor], layout: Layout) -> bool:
        """No shortcut."""
        return False

    def gather_gradients(self, params: list[Tensor], layout: Layout) -> list[Tensor] | None:
        """No shortcut."""
        return None

    def sum_squares_(self, slots: Tensor, tensors: Sequence[Tensor], layout: Layout) -> None:
        for tensor, first in zip(tensors, layout.first_slots, strict=True):
            for i, chunk in enumerate(torch.split(_flat(tensor), CHUNK_ELEMENTS)):
                if chunk.numel():
                    slots[first + i] = chunk.to(torch.float64).square().sum()

    def max_abs_(self, slots: Tensor, tensors: Sequence[Tensor], layout: Layout) -> None:
        for tensor, first in zip(tensors, layout.first_slots, strict=True):
            for i, chunk in enumerate(torch.split(_flat(tensor), CHUNK_ELEMENTS)):
                if chunk.numel():
                    slots[first + i] = chunk.to(torch.float64).abs().max()

    def accumulate_(
        self,
        accumulators: Sequence[Tensor],
        slots: AccumulateSlots,
        grads: Sequence[Tensor],
        layout: Layout,
        *,
        store: bool,
    ) -> None:
        if slots.grad_sums is not None:
            self.sum_squares_(slots.grad_sums, grads, layout)
        if slots.prior_sums is not None and store:
            for first, size in zip(layout.first_slots, layout.num_elements, strict=True):
                slots.prior_sums[first : first + num_chunks(size)] = 0.0
        elif slots.prior_sums is not None:
            self.sum_squares_(slots.prior_sums, accumulators, layout)
        for accumulator, grad in zip(accumulators, grads, strict=True):
            total = _wide(grad) if store else _wide(accumulator) + _wide(grad)
            real_view(accumulator).copy_(total)
        if slots.sums is not None:
            self.sum_squares_(slots.sums, accumulators, layout)

    def coefficient_(
        self, stats: Tensor, slots: Tensor, *, divisor: float, max_norm: float, maxima: bool
    ) -> None:
        if slots.numel() == 0:
            total = slots.new_zeros(())
        else:  # cumsum adds in index order; sum() may add pairwise
            total = slots.max() if maxima else slots.cumsum(0)[-1].sqrt()
        norm = total / divisor
        unbounded = max_norm == float("inf")
        clip = torch.ones_like(norm) if unbounded else (max_norm / (norm + 1e-6)).clamp(max=1.0)
        stats.copy_(torch.stack((norm, clip / divisor, clip)))

    def scale_(self, tensors: Sequence[Tensor], stats: Tensor, layout: Layout) -> None:
        for tensor in tensors:
            real_view(tensor.detach()).copy_(_wide(tensor) * _factor(stats, tensor))

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
        if _is_shut(stats, companions):
            return
        maxima: Sequence[Tensor | None] = states.max_exp_avg_sqs or [None] * len(params)
        moments = zip(states.steps, states.exp_avgs, states.exp_avg_sqs, maxima, strict=True)
        for row, (total, state) in enumerate(zip(sums, moments, strict=True)):
            weights = _Weights(params, layout, companions, row)
            weights.write(_adam_row(weights.read(), *state, total, stats, scalars))
            weights.move_average()

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
        if _is_shut(stats, companions):
            return
        for row, total in enumerate(sums):
            weights = _Weights(params, layout, companions, row)
            buffer = None if buffers is None else buffers[row]
            weights.write(_sgd_row(weights.read(), buffer, total, stats, scalars))
            weights.move_average()

    def move_average_(
        self, params: Sequence[Tensor], stats: Tensor, layout: Layout, companions: Companions
    ) -> None:
        if _is_shut(stats, companions):
            return
        for row in range(len(params)):
            _Weights(params, layout, companions, row).move_average()


class _Weights:
    """One row's parameter with its companions."""

    def __init__(
        self, params: Sequence[Tensor], layout: Layout, companions: Companions, row: int
    ) -> None:
        self._param = real_view(params[row].detach())
        self._companions = companions
        self._first_slot = layout.first_slots[row]
        self._row = row
        is_half = self._param.dtype in HALVES
        has_master = companions.masters is not None and is_half
        masters = companions.masters if has_master else None
        self._master = None if masters is None else real_view(masters[row])
        self._is_stochastic = companions.rounding_key is not None and is_half and not has_master

    def read(self) -> Tensor:
        """The parameter in the dtype that arithmetic runs in."""
        if self._master is None:
            return _wide(self._param)
        if self._master.dtype == torch.int16:
            return join(self._param, self._master)
        return self._master

    def write(self, values: Tensor) -> None:
        """Stores `values`, rounded as the row is."""
        if self._is_stochastic:
            values = self._rounded(values)
        if self._master is not None and self._master.dtype == torch.int16:
            values, remainder = split(values)
            self._master.copy_(remainder)
        elif self._master is not None:
            self._master.copy_(values)
        self._param.copy_(values)

    def move_average(self) -> None:
        """Moves the row's average towards the parameter as it is now."""
        if self._companions.averages is not None:
            average = real_view(self._companions.averages[self._row])
            value = self.read()
            moved = average + self._companions.average_weight * (value - average)
            average.copy_(torch.where(value == average, average, moved))  # -inf - -inf is NaN

    def _rounded(self, values: Tensor) -> Tensor:
        """Random bits go by the place in memory: chunk, and element within it."""
        assert self._companions.rounding_key is not None
        rounded = torch.empty_like(self._param)
        wide = torch.empty_like(self._param, dtype=torch.float32).copy_(values)
        into, chunks = (torch.split(_flat(t), CHUNK_ELEMENTS) for t in (rounded, wide))
        for i, chunk in enumerate(chunks):
            key = chunk_key(self._companions.rounding_key, self._first_slot + i)
            into[i].copy_(
                round_stochastically(chunk, rounded.dtype, random_bits(key, chunk.numel()))
            )
        return rounded


def _is_shut(stats: Tensor, companions: Companions) -> bool:
    """Whether a gated update must not happen."""
    return companions.is_gated and not bool(stats[0].isfinite())


def _factor(stats: Tensor, like: Tensor) -> Tensor:
    """The coefficient in the dtype that arithmetic on `like` runs in."""
    return stats[1].to(_wide(like).dtype)


def _adam_row(
    p: Tensor,
    step: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    maximum: Tensor | None,
    total: Tensor,
    stats: Tensor,
    s: AdamScalars,
) -> Tensor:
    """Kingma & Ba 2015, algorithm 1; decoupled decay as in Loshchilov & Hutter 2019."""
    step += 1
    t = step.item()
    m, v = _wide(exp_avg), _wide(exp_avg_sq)
    g = _wide(total) * _factor(stats, total)
    if s.maximize:
        g = -g
    if s.decoupled:
        p = p * (1 - s.lr * s.weight_decay)
    elif s.weight_decay != 0:
        g = g + s.weight_decay * p
    m = m + (1 - s.beta1) * (g - m)
    v = v * s.beta2 + (1 - s.beta2) * g * g
    second = v
    if maximum is not None:
        second = torch.maximum(_wide(maximum), v)
        real_view(maximum).copy_(second)
    denominator = second.sqrt() / (1 - s.beta2**t) ** 0.5 + s.eps
    real_view(exp_avg).copy_(m)
    real_view(exp_avg_sq).copy_(v)
    moved: Tensor = p - (s.lr / (1 - s.beta1**t)) * m / denominator
    return moved


def _sgd_row(
    p: Tensor, buffer: Tensor | None, total: Tensor, stats: Tensor, s: SgdScalars
) -> Tensor:
    """Sutskever et al. 2013 as torch writes it: the learning rate stays outside the buffer."""
    g = _wide(total) * _factor(stats, total)
    if s.maximize:
        g = -g
    if s.weight_decay != 0:
        g = g + s.weight_decay * p
    if buffer is not None:
        b = g if s.first else s.momentum * _wide(buffer) + (1 - s.dampening) * g
        real_view(buffer).copy_(b)
        g = g + s.momentum * b if s.nesterov else b
    return p - s.lr * g
