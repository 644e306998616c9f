"""The parity suite: a backend against `backends/reference.py`, op by op and flag by flag."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from gpu import gradient_parity, update_parity
from gpu.setting import Found, Setting, run_each
from gpu.subject import Subject
from stepclock_ext import ops

__all__ = ["PARTS", "check_backend", "run"]

PARTS: dict[str, dict[str, Callable[[Subject], None]]] = {
    "gradients": gradient_parity.CHECKS,
    "adam": update_parity.ADAM_CHECKS,
    "sgd": update_parity.SGD_CHECKS,
}


def check_backend(setting: Setting, part: str, backend: ops.Backend) -> Found:
    """Runs one part of the suite on a backend, on the device that it is for."""
    subject = Subject.of(backend, is_small=setting.is_small)
    return run_each(setting, {name: partial(c, subject) for name, c in PARTS[part].items()})


def run(setting: Setting, part: str) -> Found:
    """As `check_backend`, on the backend of that name."""
    return check_backend(setting, part, ops.make_backend(setting.backend, setting.device.torch))
