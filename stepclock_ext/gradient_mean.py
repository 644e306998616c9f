"""The mean of gradients over ranks, where no engine takes it: in flat buffers, after backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from .ranks import Ranks

__all__ = ["average_gradients_"]

_BUFFER_BYTES = 25 * 2**20


def average_gradients_(params: Sequence[Tensor], ranks: Ranks, what: str) -> None:
    """Makes each ``.grad`` the mean over ranks, once; equal ones stay as they are.

    A parameter without a gradient on some ranks counts as zero there; without one on every rank it
    has none afterwards. 16-bit gradients are added in fp32.

    Args:
        params: the same on every rank.
        ranks: who takes part.
        what: where we are, for messages.

    Raises:
        RuntimeError: a gradient is sparse, or a rank did not take part.
    """
    for p in params:
        if p.grad is not None and p.grad.layout != torch.strided:
            raise RuntimeError(
                "ClockedOptimizer: gradients must be dense where they are reduced after backward, "
                f"got a sparse one of shape {tuple(p.shape)}; build its Embedding with sparse=False"
            )
    found = ranks.any([p.grad is not None for p in params], what)
    for part in _parts([p for p, is_there in zip(params, found, strict=True) if is_there]):
        _average_(part, ranks, what)


def _average_(params: list[Tensor], ranks: Ranks, what: str) -> None:
    for p in params:
        if p.grad is None:
            p.grad = torch.zeros_like(p, memory_format=torch.preserve_format)
    grads = [_real(p.grad.detach()) for p in params if p.grad is not None]
    wide = torch.promote_types(grads[0].dtype, torch.float32)
    flat = torch.cat([grad.reshape(-1).to(wide) for grad in grads])
    reduce: Callable[[], object] = partial(dist.all_reduce, flat, group=ranks.sums)
    ranks.call(reduce, what)
    flat /= ranks.size
    start = 0
    for grad in grads:
        grad.copy_(flat[start : start + grad.numel()].view(grad.shape))
        start += grad.numel()


def _parts(params: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Parameters that share a buffer: alike in dtype and device, up to a size."""
    open_parts: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for p in params:
        key = (p.dtype, p.device)
        open_parts.setdefault(key, []).append(p)
        sizes[key] = sizes.get(key, 0) + p.numel() * max(4, p.dtype.itemsize)
        if sizes[key] >= _BUFFER_BYTES:
            yield open_parts.pop(key)
            del sizes[key]
    yield from open_parts.values()


def _real(grad: Tensor) -> Tensor:
    return torch.view_as_real(grad) if grad.is_complex() else grad
