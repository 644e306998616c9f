"""How an fp32 value becomes 16 bits beside rounding to nearest, in plain PyTorch.

The specification of ``csrc/rounding.h``: both give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["chunk_key", "join", "random_bits", "round_stochastically", "split", "update_key"]

_MASK_32 = 0xFFFFFFFF
_MASK_64 = 0xFFFFFFFFFFFFFFFF
_WEYL_64 = 0x9E3779B97F4A7C15


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest bf16 of each fp32 value, ties away from zero, and the 16 bits that it lacks.

    Ties to even could not be undone from 16 bits. A NaN loses its payload.

    Args:
        values: fp32, any shape.

    Returns:
        bf16 values and int16 remainders, of the same shape; `join` gives every bit back.

    Example:
        >>> half, remainder = split(torch.tensor([1.0, 1.00390625, -1.001]))
        >>> half.tolist(), remainder.tolist()
        ([1.0, 1.0078125, -1.0], [0, -32768, 8389])
        >>> join(half, remainder).tolist() == torch.tensor([1.0, 1.00390625, -1.001]).tolist()
        True
    """
    bits = values.contiguous().view(torch.int32).to(torch.int64) & _MASK_32
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    bits = torch.where(is_nan, (bits & 0x80000000) | 0x7FC00000, bits)
    half = _as_int16((bits + 0x8000) >> 16).view(torch.bfloat16)
    return half, _as_int16(bits)


def join(half: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 values that `split` took apart.

    Args:
        half: bf16.
        remainder: int16, of the same shape.
    """
    bits = (half.contiguous().view(torch.int16).to(torch.int32) << 16) + remainder.to(torch.int32)
    return bits.view(torch.float32)


def update_key(seed: int, update: int) -> int:
    """64 bits that name one update of one run (splitmix64, Steele et al. 2014)."""
    return _mix((seed + (update + 1) * _WEYL_64) & _MASK_64)


def chunk_key(key: int, slot: int) -> int:
    """32 bits that name a chunk in the update that `key` names."""
    return _mix((key + slot * _WEYL_64) & _MASK_64) >> 32


def random_bits(key: int, num_elements: int) -> Tensor:
    """32 random bits for each element of the chunk that `key` names, as int64.

    A Weyl sequence through the finalizer of MurmurHash3 (Appleby 2011).
    """
    h = (torch.arange(num_elements) * 0x9E3779B9 + key) & _MASK_32
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _MASK_32
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _MASK_32
    return h ^ (h >> 16)


def round_stochastically(values: Tensor, dtype: torch.dtype, random: Tensor) -> Tensor:
    """`values` rounded up or down, with the probabilities that keep the mean.

    Args:
        values: fp32.
        dtype: bf16 or fp16.
        random: 32 bits an element, as `random_bits` gives them.
    """
    bits = values.contiguous().view(torch.int32).to(torch.int64) & _MASK_32
    random = random.to(bits.device)
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    if dtype == torch.bfloat16:
        kept = torch.where(is_nan, bits | 0x00400000, bits + (random >> 16))
        return _as_int16(kept >> 16).view(dtype)
    noise = random >> 19
    is_small = magnitude < 0x38800000
    units = torch.where(is_small, values.abs(), 0.0) * 2.0**24
    subnormal = (units + noise.to(torch.float32) * 2.0**-13).to(torch.int64)
    half = torch.where(is_small, subnormal, (magnitude - 0x38000000 + noise) >> 13)
    half = torch.where(magnitude >= 0x47800000, 0x7C00, half)
    half = torch.where(is_nan, 0x7E00, half)
    return _as_int16(((bits >> 16) & 0x8000) | half).view(dtype)


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return z ^ (z >> 31)


def _as_int16(bits: Tensor) -> Tensor:
    """The lower 16 bits of int64 values as int16."""
    return (((bits & 0xFFFF) ^ 0x8000) - 0x8000).to(torch.int16)
