"""Where the random-number generators of a process stand: Python's, NumPy's and torch's."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["RandomState"]


@dataclass(frozen=True, eq=False)
class RandomState:
    """The global generators. A generator of one's own is saved by ``generator.get_state()``.

    Attributes:
        python: as ``random.getstate()`` gives it.
        numpy: as ``numpy.random.get_state(legacy=False)`` gives it, its key a list; None where
            NumPy was not loaded.
        torch_cpu: as ``torch.get_rng_state()`` gives it.
        cuda: one a device; empty without CUDA.

    Example:
        >>> state = RandomState.capture()
        >>> drawn = random.random(), torch.rand(3)
        >>> state.restore()
        >>> again = random.random(), torch.rand(3)
        >>> drawn[0] == again[0], torch.equal(drawn[1], again[1])
        (True, True)
    """

    python: tuple[Any, ...]
    numpy: dict[str, Any] | None
    torch_cpu: Tensor
    cuda: tuple[Tensor, ...]

    @staticmethod
    def capture() -> RandomState:
        """The state as it is; draws nothing."""
        has_cuda = torch.cuda.is_available()
        return RandomState(
            python=random.getstate(),
            numpy=_numpy_state() if "numpy" in sys.modules else None,
            torch_cpu=torch.get_rng_state(),
            cuda=tuple(torch.cuda.get_rng_state_all()) if has_cuda else (),
        )

    @staticmethod
    def from_state_dict(state: dict[str, Any]) -> RandomState:
        """The state that `state_dict` described, tried on generators made for it.

        Raises:
            ValueError: a generator of this process would not take it.
        """
        try:
            found = RandomState(**{**state, "cuda": tuple(state["cuda"])})
            random.Random().setstate(found.python)
            torch.Generator().set_state(found.torch_cpu)
            for device, saved in zip(range(_num_devices()), found.cuda, strict=False):
                torch.Generator(f"cuda:{device}").set_state(saved)
            numpy = _import_numpy() if found.numpy is not None else None
            if numpy is not None:
                numpy.random.RandomState().set_state(found.numpy)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as e:
            raise ValueError(
                f"RandomState: the state must be one that state_dict() gave, got "
                f"{type(e).__name__}: {e}; pass an undamaged one"
            ) from e
        return found

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain Python values."""
        return {**vars(self), "cuda": list(self.cuda)}

    def restore(self) -> None:
        """Sets the generators, of CUDA those of the devices that are here as well."""
        random.setstate(self.python)
        torch.set_rng_state(self.torch_cpu)
        for device, saved in zip(range(_num_devices()), self.cuda, strict=False):
            torch.cuda.set_rng_state(saved, device)
        numpy = _import_numpy() if self.numpy is not None else None
        if numpy is not None:
            numpy.random.set_state(self.numpy)


def _num_devices() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _import_numpy() -> Any:
    """NumPy, or None where it is not installed: then nobody can draw from it."""
    try:
        import numpy
    except ImportError:
        return None
    return numpy


def _numpy_state() -> dict[str, Any]:
    state: dict[str, Any] = _import_numpy().random.get_state(legacy=False)
    inner = {
        name: value.tolist() if hasattr(value, "tolist") else value
        for name, value in state["state"].items()
    }
    return {**state, "state": inner}
