"""What a stage is told, and how what it found is put into words."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpu.device import Device
from gpu.outcomes import FAIL, NO_GPU, NO_TIME, PASS

__all__ = ["Found", "Setting", "run_each"]

# The outcome under "outcome", why under "error", and numbers under other names.
Found = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """Where a stage runs, on what, and until when.

    Attributes:
        device: of the tensors.
        backends: names; all but the races use the first one alone.
        is_small: sizes for a dry run.
        deadline: on `time.monotonic`.
    """

    device: Device
    backends: tuple[str, ...]
    is_small: bool
    deadline: float

    @property
    def backend(self) -> str:
        return self.backends[0]

    @property
    def passed(self) -> str:
        """The outcome of a stage that only a GPU can put to the test."""
        return PASS if self.device.is_cuda else NO_GPU

    def has_time(self, seconds: float = 0.0) -> bool:
        """Whether that many are left."""
        return time.monotonic() + seconds < self.deadline


def run_each(setting: Setting, checks: Mapping[str, Callable[[], Any]]) -> Found:
    """Runs checks until time is up; one that fails does not stop the others.

    Returns:
        The outcome, the first error, and under "checks" what each had to say: what it returned,
        or its error. After a fault that the device does not recover from nothing more is run.
    """
    said: dict[str, Any] = {}
    errors: list[str] = []
    cut = False
    for name, check in checks.items():
        if not setting.has_time():
            said[name], cut = NO_TIME, True
            continue
        try:
            result = check()
            setting.device.synchronize()
            said[name] = PASS if result is None else result
        except Exception as e:
            said[name] = f"{FAIL}: {type(e).__name__}: {e}"
            errors.append(f"{name}: {type(e).__name__}: {e}")
            if not isinstance(e, AssertionError) and not _is_alive(setting.device):
                errors.append("the device is lost")
                break
    outcome = FAIL if errors else NO_TIME if cut else PASS
    found: Found = {"outcome": outcome, "checks": said}
    return found | ({"error": "; ".join(errors)} if errors else {})


def _is_alive(device: Device) -> bool:
    try:
        device.synchronize()
    except RuntimeError:
        return False
    return True
