"""What the host reads late: numbers on their way from a device, and a clock that waits for them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .clock import StepClock

if TYPE_CHECKING:
    from .optimizer import ClockedOptimizer

__all__ = ["LateClock", "LateReading", "watch_clock"]


class LateReading:
    """Numbers on their way from the device: stats, and the sum of losses where that is there."""

    def __init__(self, numbers: Tensor) -> None:
        self._event: Any = None
        if numbers.device.type == "cuda":
            self._numbers = torch.empty(
                numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True
            )
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(numbers.device))
        else:
            self._numbers = numbers.clone()

    def wait(self) -> list[float]:
        """The numbers, when they are here."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[float] = self._numbers.tolist()
        return numbers


_READ = frozenset(
    (
        "micro_step",
        "update_step",
        "skipped_updates",
        "epoch",
        "micro_step_in_epoch",
        "weight_seen",
        "micro_step_in_window",
        "due",
        "state_dict",
    )
)


class LateClock(StepClock):
    """A clock whose readers first see to it that the last update is settled."""

    def __getattribute__(self, name: str) -> Any:
        if name in _READ:
            owner = vars(self)["owner"]()
            if owner is not None:
                owner._settle_late()
        return super().__getattribute__(name)

    def __reduce__(self) -> Any:
        return _copy_clock, (self.state_dict(), self.updates_per_epoch, self._fired_all)


def watch_clock(opt: ClockedOptimizer) -> None:
    """Makes the wrapper's clock one that settles, whoever holds it."""
    opt._clock.__class__ = LateClock
    vars(opt._clock)["owner"] = weakref.ref(opt)


def _copy_clock(state: dict[str, Any], updates_per_epoch: Any, fired_all: int) -> StepClock:
    clock = StepClock(updates_per_epoch=updates_per_epoch)
    clock.load_state_dict(state)
    clock._fired_all = fired_all
    return clock
