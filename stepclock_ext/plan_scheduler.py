"""The torch scheduler of a curve: a factor on each group's own base rate."""

from __future__ import annotations

import math
import warnings
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["Curve", "PlanScheduler"]


class Curve(Protocol):
    """A rate for each update from 1 on; `Schedule` is one, a remapped schedule another."""

    @property
    def learning_rate(self) -> float:
        """The base rate that the curve is drawn for."""

    @property
    def total_updates(self) -> int:
        """The last update that was planned."""

    def lr_at(self, update: int) -> float:
        """The rate that `update` uses."""


class PlanScheduler(LRScheduler):
    """Sets each group's rate for the next update from a curve.

    A group whose base rate is the curve's `learning_rate` gets exactly ``curve.lr_at(update)``,
    another one that rate times its own base rate over `learning_rate`::

        built:   update 1's rate is set
        step():  last_epoch += 1, the updates done; the rate of update last_epoch + 1 is set

    Past the planned updates the curve says what stays, and one warning is given. A group that is
    added later takes part from the next `step()` on, with the rate it has then as its base rate.

    Args:
        optimizer: what the rates are for; a wrapper is one as well.
        curve: the rates.

    Raises:
        ValueError: no group has `curve.learning_rate` as its base rate.
    """

    def __init__(self, optimizer: Optimizer, curve: Curve) -> None:
        _check_base_rates(optimizer, curve.learning_rate)
        self.curve = curve
        self._warned = False
        super().__init__(optimizer)
        self.base_lrs = [float(base) for base in self.base_lrs]  # a tensor is read once

    @property
    def total_updates(self) -> int:
        """The updates that the curve is planned for."""
        return self.curve.total_updates

    def get_lr(self) -> list[float | Tensor]:
        """Each group's rate for update ``last_epoch + 1``."""
        if self.last_epoch > self.total_updates and not self._warned:
            self._warned = True
            warnings.warn(
                f"TrainPlan: {self.total_updates} updates were planned and update "
                f"{self.last_epoch} is done; the rate stays as it is",
                UserWarning,
                stacklevel=2,
            )
        for group in self.optimizer.param_groups[len(self.base_lrs) :]:
            self.base_lrs.append(group.setdefault("initial_lr", float(group["lr"])))
        rate = self.curve.lr_at(self.last_epoch + 1)
        return [rate * self._factor(float(base)) for base in self.base_lrs]

    def _factor(self, base: float) -> float:
        peak = self.curve.learning_rate
        return 1.0 if _is_same(base, peak) else base / peak

    def state_dict(self) -> dict[str, Any]:
        """The counters. The curve is the plan's, the base rates are the optimizer's as built."""
        state = super().state_dict()
        return {key: value for key, value in state.items() if key not in ("curve", "base_lrs")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over saved counters, and sets the rates that belong to them."""
        super().load_state_dict(state_dict)
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = self.get_lr()


def _check_base_rates(optimizer: Optimizer, learning_rate: float) -> None:
    rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
    if not any(_is_same(rate, learning_rate) for rate in rates):
        raise ValueError(
            f"TrainPlan: learning_rate must be the base rate of a parameter group, got "
            f"{learning_rate} where the groups have {', '.join(map(str, rates))}; build plan and "
            "optimizer with the same rate"
        )


def _is_same(base: float, learning_rate: float) -> bool:
    # 1e-6: a rate in an fp32 tensor is within 6e-8 of the number that was written
    return math.isclose(base, learning_rate, rel_tol=1e-6)
