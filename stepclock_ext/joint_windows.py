"""The end of a window over several processes: they meet, and agree on what happens.

Each says whether it asks for an update, or has ended its epoch; what its window weighs and lost;
and where its clock stands. All hear the same and decide the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING
from zlib import crc32

import torch

from .ranks import Ranks
from .reductions import Reduction

if TYPE_CHECKING:
    from .optimizer import ClockedOptimizer

__all__ = ["NUM_REPORTED", "JointWindows", "Verdict"]


@dataclass(frozen=True)
class _Report:
    """What one rank says; numbers, since they travel as such."""

    asks: float
    ended: float
    update_step: float
    window_steps: float
    scale: float
    unit: float
    rates: float
    num_before: float
    trained: float
    micro_step: float
    micro_steps: float
    weight: float
    loss: float
    loss_known: float
    seeded: float
    is_complete: float
    num_rounds: float


NUM_REPORTED = len(fields(_Report))

# What must be the same on all ranks, and how a message calls it.
_COMMON = {
    "update_step": "number of updates",
    "window_steps": "gradient_accumulation_steps",
    "scale": "loss scale",
    "unit": "unit of weights",
    "rates": "sum of the groups' learning rates",
    "trained": "set of trained parameters (requires_grad)",
    "num_before": "number of collectives before this window (discard() on one rank alone?)",
}


@dataclass(frozen=True)
class Verdict:
    """What the ranks have agreed on.

    Attributes:
        updates: the open windows, of all ranks together, end here.
        ended: every rank is at the end of its epoch.
    """

    updates: bool
    ended: bool


class JointWindows:
    """The windows of all ranks as one.

    Args:
        ranks: who takes part.

    Attributes:
        reduction: adds their gradients; set by whoever builds it.
        next_unit: what the next window counts weights in, the same on every rank.
    """

    reduction: Reduction

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.next_unit = 1.0

    def meet(self, opt: ClockedOptimizer, *, asks: bool, ended: bool = False) -> Verdict:
        """Every rank comes here at the end of a window, in `flush` and in `end_epoch`.

        Where there is an update, gradients are reduced afterwards, and window and clock are those
        of all ranks together.

        Raises:
            RuntimeError: a rank did not come in time, or stands somewhere else.
        """
        what = self.describe(opt, ended=ended and not asks)
        mine = self._report(opt, asks=asks, ended=ended)
        reports = [_Report(*told) for told in self.ranks.gather(astuple(mine), what)]
        self._refuse_savers(reports, what)
        self._check_common(reports, _COMMON)
        if self.reduction.is_averaged and any(r.asks for r in reports):
            self._check_common(reports, {"num_rounds": "micro steps that are reduced"})
        verdict = Verdict(any(r.asks for r in reports), all(r.ended for r in reports))
        if verdict.updates:
            assert opt._processes is not None
            opt._processes.learn_order(opt, what)
            largest = max(r.weight / max(1.0, r.micro_steps) for r in reports)
            if largest > 0:
                self.next_unit = 2.0 ** math.floor(math.log2(largest))
            self.reduction.complete(
                max(int(r.num_rounds) for r in reports),
                what,
                is_complete=all(r.is_complete for r in reports),
            )
            self._join(opt, reports)
        elif verdict.ended and opt.tail != "carry":
            opt.clock.align(int(max(r.micro_step for r in reports)))
        return verdict

    def describe(self, opt: ClockedOptimizer, *, ended: bool = False) -> str:
        """Where this rank stands, for messages."""
        clock = opt.clock
        if ended:
            return f"the end of epoch {clock.epoch + 1} (update {clock.update_step} is done)"
        return f"the end of update {clock.update_step + 1}"

    def factor(self, reduction: str) -> float:
        """What the divisor of a window is multiplied by: over ranks "sum" is a mean, as in DDP."""
        if self.reduction.is_averaged:
            return 1.0 / self.ranks.size if reduction == "mean" else 1.0
        return 1.0 if reduction == "mean" else float(self.ranks.size)

    def _report(self, opt: ClockedOptimizer, *, asks: bool, ended: bool) -> _Report:
        window, clock = opt._window, opt.clock
        return _Report(
            asks=asks,
            ended=ended,
            update_step=clock.update_step,
            window_steps=opt.gradient_accumulation_steps,
            scale=window.scale,
            unit=window.unit if window.seeded or not window.is_scaled else self.next_unit,
            rates=sum(opt._learning_rates()),
            num_before=self.reduction.num_collectives_before,
            trained=_mark_trained(opt),
            micro_step=clock.micro_step,
            micro_steps=clock.micro_step_in_window,
            weight=window.weight,
            loss=0.0 if window.loss_sum is None else window.loss_sum.item(),
            loss_known=window.loss_known,
            seeded=window.seeded,
            is_complete=self.reduction.is_complete,
            num_rounds=self.reduction.num_rounds,
        )

    def _refuse_savers(self, reports: list[_Report], what: str) -> None:
        savers = [r for r, report in enumerate(reports) if report.update_step < 0]
        if savers:
            raise RuntimeError(
                f"ClockedOptimizer: every rank must be at {what}, got rank "
                f"{', '.join(map(str, savers))} saving or loading a checkpoint; call it on all of "
                "them, not under 'if rank == 0'"
            )

    def _check_common(self, reports: list[_Report], common: dict[str, str]) -> None:
        for name, called in common.items():
            values = [getattr(r, name) for r in reports]
            if len(set(values)) > 1:
                raise RuntimeError(
                    f"ClockedOptimizer: the {called} must be the same on all ranks, got "
                    f"{_listed(values)} on ranks 0 to {len(values) - 1}; load the same state, set "
                    "the same options and report the same metrics on every rank"
                )

    def _join(self, opt: ClockedOptimizer, reports: list[_Report]) -> None:
        """Window and clock count what all ranks did."""
        window = opt._window
        weight, loss = _sum(r.weight for r in reports), _sum(r.loss for r in reports)
        micro_steps = int(max(r.micro_steps for r in reports))
        opt.clock.join_window(micro_steps, weight)
        window.weight = weight
        window.unit = reports[0].unit
        window.seeded = any(r.seeded for r in reports)
        window.loss_known = all(r.loss_known for r in reports)
        if opt.reduction == "sum":  # of a window; over ranks it is the mean, as of the gradient
            loss /= self.ranks.size
        window.loss_sum = torch.tensor(loss, dtype=torch.float64, device="cpu")


def _mark_trained(opt: ClockedOptimizer) -> float:
    """A number that says which parameters are trained."""
    bits = bytes(p.requires_grad for p in opt._pass.rows.params)
    return float(crc32(bits))


def _sum(numbers: Iterable[float]) -> float:
    """One after another, so that every rank rounds alike."""
    total = 0.0
    for number in numbers:
        total += number
    return total


def _listed(values: list[float]) -> str:
    shown = ", ".join(f"{value:g}" for value in values[:16])
    return shown + (" ..." if len(values) > 16 else "")
