"""The backends: one specification and its fast twins."""

from __future__ import annotations

import torch

from . import cuda, native, triton
from .contract import Backend, BackendStatus
from .cuda import CudaBackend
from .native import NativeBackend
from .reference import ReferenceBackend
from .triton import TritonBackend

__all__ = ["BACKEND_NAMES", "backends", "make_backend"]

BACKEND_NAMES = ("reference", "cpu", "cuda", "triton")


def backends() -> dict[str, BackendStatus]:
    """Each backend by name, with whether it can be used here and why.

    >>> backends()["reference"].available
    True
    """
    return {
        "reference": BackendStatus(available=True, reason="plain PyTorch, any device"),
        "cpu": native.status(),
        "cuda": cuda.status(),
        "triton": triton.status(),
    }


def make_backend(name: str, device: torch.device | None = None) -> Backend:
    """The backend called `name`.

    Args:
        name: a key of `backends`, or "auto": for tensors on a GPU the CUDA kernels, else Triton's;
            for all others, and where neither can be used, the C++ kernels or plain PyTorch.
        device: of the tensors; None is the CPU.

    Raises:
        ValueError: no backend has that name.
        RuntimeError: it cannot be used here; the message says why.
    """
    if name != "auto" and name not in BACKEND_NAMES:
        choices = ", ".join(("auto", *BACKEND_NAMES))
        raise ValueError(
            f"ClockedOptimizer: backend must be one of {choices}, got {name!r}; backends() says "
            "which can be used here"
        )
    if name == "auto":
        name = _choose(device)
    status = backends()[name]
    if not status.available:
        raise RuntimeError(
            f"ClockedOptimizer: backend must be one that can be used here, got {name!r} "
            f"({status.reason}); pass backend='auto' to fall back"
        )
    if name == "cuda":
        return CudaBackend(device if device is not None and device.type == "cuda" else None)
    if name == "triton":
        return TritonBackend(device)
    return NativeBackend() if name == "cpu" else ReferenceBackend()


def _choose(device: torch.device | None) -> str:
    if device is not None and device.type == "cuda" and cuda.status().available:
        return "cuda"
    if device is not None and device.type in ("cuda", "xpu") and triton.status().available:
        return "triton"
    return "cpu" if native.status().available else "reference"
