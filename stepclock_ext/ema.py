"""EMA: averaged weights, moved in the update pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["EMA"]

_WIDE = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.complex32: torch.complex64,
}


class EMA:
    """An exponential moving average of a wrapper's parameters, one move for each update::

        start:    average = parameter                   (before the first update)
        update u: d = min(decay, (1 + u) / (10 + u))    with warmup, u counted from 1
                  average += (1 - d) * (parameter - average)

    A skipped update moves nothing. Averages are fp32 beside 16-bit parameters, and average their
    masters where there are some. Polyak & Juditsky 1992; the warm-up is TensorFlow's
    ``ExponentialMovingAverage(num_updates=...)``. Buffers of a module are not averaged.

    Args:
        decay: from 0 to below 1; 0.999 remembers some 1,000 updates.
        warmup: shortens the memory while there is little to remember.

    Raises:
        TypeError, ValueError: `decay` is no number from 0 to below 1.

    Example:
        >>> from stepclock_ext import ClockedOptimizer
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = model.weight.data.fill_(1.0)
        >>> ema = EMA(decay=0.5)
        >>> opt = ClockedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), ema=ema)
        >>> opt.backward(model.weight.sum())
        >>> opt.step().updated
        True
        >>> model.weight.item(), ema.average(model.weight).item()
        (0.0, 0.5)
        >>> with ema.swap(model):
        ...     model.weight.item()
        0.5
        >>> model.weight.item()
        0.0
    """

    def __init__(self, decay: float, warmup: bool = False) -> None:
        if isinstance(decay, bool) or not isinstance(decay, (int, float)):
            raise TypeError(f"EMA: decay must be a number, got {decay!r}; 0.999 is usual")
        if not 0 <= decay < 1:
            raise ValueError(f"EMA: decay must be from 0 to below 1, got {decay}; 0.999 is usual")
        if not isinstance(warmup, bool):
            raise TypeError(f"EMA: warmup must be True or False, got {warmup!r}")
        self.decay = float(decay)
        self.warmup = warmup
        self.updates = 0
        self.generation = 0
        self.is_swapped = False
        self.is_bound = False
        self._averages: dict[Tensor, Tensor] = {}
        # Where a process moves slices of parameters: gives the averages of whole ones. Collective.
        self.gather: Callable[[], dict[Tensor, Tensor]] | None = None

    def __repr__(self) -> str:
        return f"EMA(decay={self.decay}, warmup={self.warmup}, updates={self.updates})"

    @property
    def next_weight(self) -> float:
        """What the next update moves the averages by: 1 - decay, more in the warm-up."""
        update = self.updates + 1
        decay = min(self.decay, (1 + update) / (10 + update)) if self.warmup else self.decay
        return 1.0 - decay

    def average(self, p: Tensor) -> Tensor:
        """The average of `p`: fp32 for 16 bits, else of its dtype. Before any update, a copy.

        With sharded states it is gathered: call it on every rank.
        """
        found = self._of_parameters().get(p)
        return _start(p) if found is None else found

    def column(
        self, params: Sequence[Tensor], value_of: Callable[[Tensor], Tensor] | None = None
    ) -> list[Tensor]:
        """The averages of `params`, begun where they are new.

        Args:
            params: parameters.
            value_of: gives a new one's exact value where it has more than the parameter tells.
        """
        for p in params:
            found, dtype = self._averages.get(p), _WIDE.get(p.dtype, p.dtype)
            if found is not None and found.shape == p.shape and found.device == p.device:
                if found.dtype == dtype:
                    continue
                self._averages[p] = found.to(dtype)  # model.double(), say
            else:
                self._averages[p] = (value_of or _start)(p).to(dtype)
            self.generation += 1
        return [self._averages[p] for p in params]

    def _of_parameters(self) -> dict[Tensor, Tensor]:
        return self._averages if self.gather is None else self.gather()

    @contextmanager
    def swap(self, model: torch.nn.Module) -> Iterator[None]:
        """Evaluates with the averages: `model` holds them inside, and itself again after.

        Also after an exception. Takes a copy of the parameters, at their dtype, meanwhile. With
        sharded states every rank swaps.

        Raises:
            RuntimeError: they are swapped in already.
            ValueError: `model` has none of the parameters that are averaged.
        """
        if self.is_swapped:
            raise RuntimeError("EMA.swap: the averages are swapped in already; leave it first")
        averages = self._of_parameters()
        params = [p for p in model.parameters() if p in averages]
        if averages and not params:
            raise ValueError(
                f"EMA.swap: the model must hold parameters that are averaged, got "
                f"{type(model).__name__} with none of the {len(averages)}; pass the model "
                "that the optimizer was built on"
            )
        saved = [p.detach().clone() for p in params]
        self.is_swapped = True
        try:
            for p in params:
                p.data.copy_(averages[p])  # no new version: what it was comes back
            yield
        finally:
            for p, before in zip(params, saved, strict=True):
                p.data.copy_(before)
            self.is_swapped = False

    def state_dict(self, params: Sequence[Tensor]) -> dict[str, Any]:
        """Updates and averages, by the index of the parameter; as for moments, no copies."""
        averages = {i: self._averages[p] for i, p in enumerate(params) if p in self._averages}
        return {"updates": self.updates, "averages": averages}

    def load_state_dict(self, params: Sequence[Tensor], state: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave, to the dtype."""
        averages = {}
        for index, saved in state["averages"].items():
            like = _start(params[index])
            averages[params[index]] = like.copy_(saved)
        self._averages = averages
        self.updates = int(state["updates"])
        self.generation += 1


def _start(p: Tensor) -> Tensor:
    """A copy of `p`, in fp32 for 16 bits."""
    return p.detach().to(_WIDE.get(p.dtype, p.dtype), copy=True)
