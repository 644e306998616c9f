"""The gradients at the end of a window, in a state that ops can walk."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["WindowGradients", "make_walkable"]


@dataclass(frozen=True, eq=False)
class WindowGradients:
    """The gradients at the end of a window, in a state that ops can walk.

    Attributes:
        grads: one a row; None where the parameter took no part.
        walked: rows for the fast backend.
        odd: rows that plain PyTorch has to work on (sparse gradients, other devices or dtypes).
    """

    grads: list[Tensor | None]
    walked: tuple[int, ...]
    odd: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        """No parameter holds a gradient."""
        return not self.walked and not self.odd

    @property
    def is_complete(self) -> bool:
        """Every parameter holds a gradient."""
        return len(self.walked) + len(self.odd) == len(self.grads)

    def of(self, rows: tuple[int, ...]) -> list[Tensor]:
        """The gradients of `rows`, all of which are present."""
        if len(rows) == len(self.grads):
            return self.grads  # type: ignore[return-value]
        return [grad for row in rows if (grad := self.grads[row]) is not None]


def make_walkable(p: Tensor, grad: Tensor, is_walked: bool, name: str) -> Tensor:
    """A gradient, or its values in its parameter's memory layout, stored back as ``.grad``.

    Args:
        p: the parameter.
        grad: its gradient as autograd left it.
        is_walked: the fast backend walks such parameters.
        name: for the message.

    Raises:
        TypeError: its layout is neither strided nor sparse COO.
    """
    if grad.layout == torch.sparse_coo:
        if not grad.is_coalesced():
            p.grad = grad = grad.coalesce()
        return grad
    if grad.layout != torch.strided:
        raise TypeError(
            f"ClockedOptimizer: the gradient of {name!r} must be strided or sparse COO, got "
            f"{grad.layout}; convert it with p.grad = p.grad.to_dense()"
        )
    if not is_walked:
        overlaps = any(s == 0 and n > 1 for s, n in zip(grad.stride(), grad.shape, strict=True))
        if overlaps:  # an expanded gradient cannot be scaled in place
            p.grad = grad = grad.clone(memory_format=torch.contiguous_format)
        return grad
    same = grad.is_contiguous() if p.is_contiguous() else grad.stride() == p.stride()
    if same and not grad.is_conj() and not grad.is_neg():
        return grad
    packed = torch.empty_like(p, dtype=grad.dtype, memory_format=torch.preserve_format)
    packed = packed.detach().copy_(grad)
    p.grad = packed
    return packed
