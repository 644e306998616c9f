"""Every rank begins with the same parameters: checked, or made so."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from .ranks import Ranks

__all__ = ["broadcast_parameters", "check_parameters", "check_shapes", "hash_tensor"]

_MULTIPLIER = 6364136223846793005  # Knuth's MMIX generator: odd, so that no digit is lost
_BLOCK = 1 << 20  # words at a time: 8 MiB of int64 beside the parameters


def check_parameters(params: Sequence[Tensor], names: Sequence[str], ranks: Ranks) -> None:
    """Compares a hash of every parameter over the ranks.

    Raises:
        ValueError: one differs, on every rank; the message names it and the ranks.
    """
    what = "the comparison of parameters"
    halves = []
    for p in params:
        number = hash_tensor(p)
        halves += [float(number & 0xFFFFFFFF), float(number >> 32)]  # exact in fp64
    _compare(ranks.gather(halves, what), names, 2, "begin with the same parameters", _SEED)


def check_shapes(params: Sequence[Tensor], names: Sequence[str], ranks: Ranks) -> None:
    """Compares number, shapes, strides and dtypes of the parameters over the ranks.

    Raises:
        ValueError: they differ, on every rank.
    """
    what = "the comparison of parameters"
    told = ranks.gather([float(len(params))], what)
    if len({tuple(numbers) for numbers in told}) > 1:
        raise ValueError(
            "ClockedOptimizer: every rank must have the same parameters, got "
            f"{[int(numbers[0]) for numbers in told]} parameters on ranks 0 to {ranks.size - 1}; "
            "build the same model and groups on every rank"
        )
    marks = [
        float(zlib.crc32(repr((tuple(p.shape), p.stride(), p.dtype)).encode())) for p in params
    ]
    told = ranks.gather(marks, what)
    build = "build the same model on every rank"
    _compare(told, names, 1, "have parameters of the same shape, strides and dtype", build)


_SEED = (
    "seed every rank alike, load the same state, or pass ReducerOptions(broadcast_parameters=True)"
)


def _compare(
    told: list[list[float]], names: Sequence[str], each: int, wanted: str, advice: str
) -> None:
    """Refuses numbers, `each` of them a parameter, that are not the same on all ranks."""
    differing = [r for r, numbers in enumerate(told) if numbers != told[0]]
    if not differing:
        return
    pairs = enumerate(zip(told[0], told[differing[0]], strict=True))
    row = next(i // each for i, (a, b) in pairs if a != b)
    raise ValueError(
        f"ClockedOptimizer: every rank must {wanted}, got others than rank 0 on ranks "
        f"{differing}, first in {names[row]!r}; {advice}"
    )


def broadcast_parameters(params: Sequence[Tensor], ranks: Ranks) -> None:
    """Gives every rank the parameters of rank 0 of the group."""
    source = dist.get_global_rank(ranks.group, 0)
    for p in params:
        data = p.detach()
        flat = torch.view_as_real(data) if data.is_complex() else data
        sent = flat.contiguous()
        send = partial(dist.broadcast, sent, source, group=ranks.sums)
        ranks.call(send, "the broadcast of parameters")
        if sent is not flat:
            flat.copy_(sent)
        torch.autograd.graph.increment_version([p])


def hash_tensor(tensor: Tensor) -> int:
    """64 bits that say what is in a tensor, and in which order: a sum of its words, each times its
    own odd number. Of the values as they lie; NaN and -0 are told apart like any other bits.

    Example:
        >>> a = torch.tensor([1.0, 2.0])
        >>> hash_tensor(a) == hash_tensor(a.clone()), hash_tensor(a) == hash_tensor(a.flip(0))
        (True, False)
    """
    flat = tensor.detach().contiguous().view(-1)
    if flat.storage_offset() * flat.element_size() % 8:  # words begin where their size divides
        flat = flat.clone()
    if not flat.numel():
        return 0
    words = flat.view(torch.uint8).view(-1)
    if words.numel() % 4 == 0:
        words = words.view(torch.int32)
    total = 0
    for start in range(0, words.numel(), _BLOCK):
        block = words[start : start + _BLOCK].to(torch.int64)
        index = torch.arange(start, start + block.numel(), device=block.device)
        factors = (index * 2 + 1) * _MULTIPLIER
        total += int(((block + 1) * factors ^ (factors >> 29)).sum().item())
    return (total + words.numel() * _MULTIPLIER) & (2**64 - 1)
