"""What a wrapper and an optimizer keep for one parameter: dtypes, and numbers of moments."""

from __future__ import annotations

import torch

__all__ = ["count_moments", "master_size", "sum_dtype", "wide_dtype"]

# Moments of the size of a parameter that an optimizer keeps; its step counters are left out.
_MOMENTS = {"sgd": 0, "adam": 2, "adamw": 2}
_EXTRA_MOMENTS = {"momentum": ("sgd",), "amsgrad": ("adam", "adamw")}
_16_BIT = (torch.bfloat16, torch.float16)


def wide_dtype(own: torch.dtype) -> torch.dtype:
    """What 16-bit parameters are summed and averaged in; others in their own dtype."""
    return torch.float32 if own in _16_BIT else own


def sum_dtype(
    own: torch.dtype, asked: torch.dtype | None, *, is_summed: bool, fused: bool
) -> torch.dtype:
    """What the window's sum of a parameter is made of.

    Args:
        own: of the parameter.
        asked: as the user says; None is `wide_dtype` where something is summed.
        is_summed: there is more than one gradient in a window, or a reduction of our own.
        fused: the wrapper keeps the sums.

    Raises:
        ValueError: the wrapper does not keep such sums.
    """
    if asked is None:
        return wide_dtype(own) if is_summed else own
    if not fused:
        return asked
    if own not in _16_BIT and asked.itemsize < own.itemsize:
        return own  # what is asked for concerns 16-bit parameters alone
    fitting = (torch.float32, own) if own in _16_BIT else (own,)
    if asked not in fitting:
        raise ValueError(
            f"MemoryLedger.of: accumulate_dtype must be {' or '.join(map(str, fitting))} for "
            f"parameters of {own}, got {asked}; pass fused=False for sums that the wrapper does "
            "not keep"
        )
    return asked


def master_size(own: torch.dtype, *, fused: bool) -> int:
    """Bytes beside a 16-bit parameter: bf16 lacks the lower half of its fp32 value."""
    return 2 if fused and own == torch.bfloat16 else 4


def count_moments(optimizer: torch.optim.Optimizer | str, *, momentum: bool, amsgrad: bool) -> int:
    """How many moments an optimizer keeps.

    Raises:
        ValueError: it is not known, or does not keep what is said.
    """
    name = optimizer if isinstance(optimizer, str) else type(optimizer).__name__
    kind = name.lower()
    if kind not in _MOMENTS:
        raise ValueError(
            f"MemoryLedger.of: optimizer must be one of {', '.join(_MOMENTS)}, got {name}; pass "
            "the one that keeps as many moments"
        )
    extra = {"momentum": momentum, "amsgrad": amsgrad}
    if not isinstance(optimizer, str):
        extra = {key: bool(optimizer.defaults.get(key)) for key in extra}
    for key, kinds in _EXTRA_MOMENTS.items():
        if extra[key] and kind not in kinds:
            raise ValueError(
                f"MemoryLedger.of: {key} must go with {' or '.join(kinds)}, got {name}; leave it "
                "out"
            )
    return _MOMENTS[kind] + sum(extra.values())
