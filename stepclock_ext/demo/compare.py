"""Both runs in turns, window by window on the same batches, and how far apart they end."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stepclock_ext import StepInfo

from .data import Batch
from .model import ByteGPT
from .plain import PlainRun
from .train import ClockedRun
from .world import ALONE, World

__all__ = [
    "Difference",
    "Spread",
    "WindowRecord",
    "loss_difference",
    "parameter_difference",
    "run_in_turns",
    "spread",
]


@dataclass(frozen=True)
class WindowRecord:
    """One window of both runs.

    Attributes:
        info: what the clocked run's step returned.
        plain_loss: the plain run's mean loss.
        tokens: bytes of the window's targets, in all processes.
        update_ms: gradients complete (with several processes: the last backward begins) ->
            parameters updated and gradients cleared, clocked.
        plain_update_ms: the same, plain.
        window_ms: the whole window, clocked.
        plain_window_ms: the same, plain.
    """

    info: StepInfo
    plain_loss: float
    tokens: int
    update_ms: float
    plain_update_ms: float
    window_ms: float
    plain_window_ms: float

    @property
    def tokens_per_second(self) -> float:
        """Of the clocked run, all processes together."""
        return self.tokens / self.window_ms * 1e3


@dataclass(frozen=True)
class Difference:
    """The largest difference, and where it is."""

    value: float
    where: str


@dataclass(frozen=True)
class Spread:
    """The median of some times, and the quarters below and above which the others lie."""

    median: float
    low: float
    high: float


def run_in_turns(
    clocked: ClockedRun,
    plain: PlainRun,
    batches: Iterator[list[Batch]],
    *,
    updates: int,
    world: World = ALONE,
) -> Iterator[WindowRecord]:
    """Trains both until the clock has counted `updates`, each process on its share of a window.

    Taking turns, both meet the same machine: its heat, its other work.

    Raises:
        NonFiniteGradientError: the clocked run skipped ten updates in a row.
    """
    while clocked.opt.clock.update_step < updates:
        window = next(batches)
        mine = world.share(window)
        start = time.perf_counter()
        info = clocked.window(mine)
        middle = time.perf_counter()
        plain_loss = plain.window(mine)
        end = time.perf_counter()
        yield WindowRecord(
            info=info,
            plain_loss=plain_loss,
            tokens=sum(targets.numel() for _, targets in window),
            update_ms=clocked.update_ms,
            plain_update_ms=plain.update_ms,
            window_ms=(middle - start) * 1e3,
            plain_window_ms=(end - middle) * 1e3,
        )


def loss_difference(records: Sequence[WindowRecord]) -> Difference:
    """The largest difference of the two runs' losses."""
    return _largest(
        Difference(
            abs((math.nan if r.info.loss is None else r.info.loss) - r.plain_loss),
            f"update {r.info.update_step}",
        )
        for r in records
    )


def parameter_difference(model: ByteGPT, other: ByteGPT) -> Difference:
    """The largest difference of an element of the two models' parameters."""
    pairs = zip(model.named_parameters(), other.parameters(), strict=True)
    return _largest(
        Difference((p.detach() - q.detach()).abs().max().item(), name) for (name, p), q in pairs
    )


def spread(times_ms: Sequence[float]) -> Spread:
    """Median and quartiles. The first time, which meets cold caches, counts only if it is alone.

    >>> spread([9.0, 1.0, 2.0, 3.0])
    Spread(median=2.0, low=1.5, high=2.5)
    """
    warm = list(times_ms[1:] or times_ms)
    if len(warm) == 1:
        return Spread(warm[0], warm[0], warm[0])
    low, median, high = statistics.quantiles(warm, n=4, method="inclusive")
    return Spread(median, low, high)


def _largest(differences: Iterator[Difference]) -> Difference:
    """NaN counts as the largest of all: where one run has no number, they are not alike."""
    return max(differences, key=lambda difference: (math.isnan(difference.value), difference.value))
