"""The specification: every op of the contract in plain PyTorch, on any device.

Tensor by tensor and without cleverness. 16-bit values are widened to fp32, worked on, and rounded
once; fp64 stays fp64; complex tensors are pairs of real numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .contract import AdamScalars, AdamStates, SgdScalars
from .layout import CHUNK_ELEMENTS, Layout, is_dense, real_view

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
    watches_addresses = False

    def supports(self, tensor: Tensor) -> bool:
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_conj():
            return False
        return is_dense(tensor)

    def release(self, layout: Layout, columns: Sequence[str]) -> None:
        """Nothing is kept between ops."""

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
        slots: Tensor | None,
        grads: Sequence[Tensor],
        layout: Layout,
        *,
        store: bool,
    ) -> None:
        for accumulator, grad in zip(accumulators, grads, strict=True):
            total = _wide(grad) if store else _wide(accumulator) + _wide(grad)
            real_view(accumulator).copy_(total)
        if slots is not None:
            self.sum_squares_(slots, accumulators, layout)

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
        grads: Sequence[Tensor],
        stats: Tensor,
        layout: Layout,
        scalars: AdamScalars,
    ) -> None:
        maxima: Sequence[Tensor | None] = states.max_exp_avg_sqs or [None] * len(params)
        rows = zip(
            params,
            grads,
            states.steps,
            states.exp_avgs,
            states.exp_avg_sqs,
            maxima,
            strict=True,
        )
        for param, grad, step, exp_avg, exp_avg_sq, maximum in rows:
            _adam_row(param, step, exp_avg, exp_avg_sq, maximum, grad, stats, scalars)

    def sgd_(
        self,
        params: Sequence[Tensor],
        buffers: Sequence[Tensor] | None,
        grads: Sequence[Tensor],
        stats: Tensor,
        layout: Layout,
        scalars: SgdScalars,
    ) -> None:
        for row, (param, grad) in enumerate(zip(params, grads, strict=True)):
            _sgd_row(param, None if buffers is None else buffers[row], grad, stats, scalars)


def _factor(stats: Tensor, like: Tensor) -> Tensor:
    """The coefficient in the dtype that arithmetic on `like` runs in."""
    return stats[1].to(_wide(like).dtype)


def _adam_row(
    param: Tensor,
    step: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    maximum: Tensor | None,
    grad: Tensor,
    stats: Tensor,
    s: AdamScalars,
) -> None:
    """Kingma & Ba 2015, algorithm 1; decoupled decay as in Loshchilov & Hutter 2019."""
    step += 1
    t = step.item()
    p, m, v = _wide(param), _wide(exp_avg), _wide(exp_avg_sq)
    g = _wide(grad) * _factor(stats, grad)
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
    p = p - (s.lr / (1 - s.beta1**t)) * m / denominator
    real_view(param.detach()).copy_(p)
    real_view(exp_avg).copy_(m)
    real_view(exp_avg_sq).copy_(v)


def _sgd_row(
    param: Tensor, buffer: Tensor | None, grad: Tensor, stats: Tensor, s: SgdScalars
) -> None:
    """Sutskever et al. 2013 as torch writes it: the learning rate stays outside the buffer."""
    p = _wide(param)
    g = _wide(grad) * _factor(stats, grad)
    if s.maximize:
        g = -g
    if s.weight_decay != 0:
        g = g + s.weight_decay * p
    if buffer is not None:
        b = g if s.first else s.momentum * _wide(buffer) + (1 - s.dampening) * g
        real_view(buffer).copy_(b)
        g = g + s.momentum * b if s.nesterov else b
    real_view(param.detach()).copy_(p - s.lr * g)
