"""The backends: one specification and its fast twins."""

from __future__ import annotations

from . import native
from .contract import Backend, BackendStatus
from .native import NativeBackend
from .reference import ReferenceBackend

__all__ = ["BACKEND_NAMES", "backends", "make_backend"]

BACKEND_NAMES = ("reference", "cpu", "cuda", "triton")


def backends() -> dict[str, BackendStatus]:
    """Each backend by name, with whether it can be used here and why.

    >>> backends()["reference"].available
    True
    """
    absent = BackendStatus(available=False, reason="this version has no GPU kernels yet")
    return {
        "reference": BackendStatus(available=True, reason="plain PyTorch, any device"),
        "cpu": native.status(),
        "cuda": absent,
        "triton": absent,
    }


def make_backend(name: str) -> Backend:
    """The backend called `name`; "auto" is the fastest one there is.

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
        name = "cpu" if native.status().available else "reference"
    status = backends()[name]
    if not status.available:
        raise RuntimeError(
            f"ClockedOptimizer: backend must be one that can be used here, got {name!r} "
            f"({status.reason}); pass backend='auto' to fall back"
        )
    return NativeBackend() if name == "cpu" else ReferenceBackend()
