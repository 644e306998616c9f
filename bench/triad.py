"""Compiles and calls `triad.cpp`: the bandwidth this machine gives to a kernel's mix of streams."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

from torch import Tensor

__all__ = ["adam_half_mix", "adam_mix", "read"]


@functools.cache
def _library() -> ctypes.CDLL:
    folder = Path(tempfile.mkdtemp(prefix="stepclock-triad-"))
    library = folder / "triad.so"
    source = Path(__file__).with_name("triad.cpp")
    flags = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def _addresses(tensors: list[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))


def adam_mix(
    params: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor], grads: list[Tensor]
) -> None:
    """Moves 28 bytes an element: reads four streams, writes three."""
    columns = [_addresses(column) for column in (params, exp_avgs, exp_avg_sqs, grads)]
    sizes = ctypes.c_int64(len(params)), ctypes.c_int64(params[0].numel())
    _library().triad_adam_mix(*columns, *sizes)


def adam_half_mix(
    params: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    sums: list[Tensor],
    *,
    remainders: list[Tensor] | None = None,
    averages: list[Tensor] | None = None,
) -> None:
    """Moves 24 bytes an element of 16-bit `params`; 28 with `remainders`, 36 with `averages` too.

    Reads every stream and writes all but `sums`; averages come with remainders only.
    """
    assert averages is None or remainders is not None
    columns = [
        None if column is None else _addresses(column)
        for column in (params, remainders, exp_avgs, exp_avg_sqs, averages, sums)
    ]
    sizes = ctypes.c_int64(len(params)), ctypes.c_int64(params[0].numel())
    _library().triad_adam_half_mix(*columns, *sizes)


def read(grads: list[Tensor]) -> None:
    """Reads 4 bytes an element."""
    sizes = ctypes.c_int64(len(grads)), ctypes.c_int64(grads[0].numel())
    _library().triad_read(_addresses(grads), *sizes)
