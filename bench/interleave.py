"""Rivals timed in turn, round by round, so that a slow moment of the machine hits them all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Race", "Rival"]


@dataclass(frozen=True)
class Rival:
    """One way to do the work: `prepare` is not timed, `run` is."""

    name: str
    prepare: Callable[[], None]
    run: Callable[[], Any]
    moved_bytes: int


@dataclass
class Race:
    """Times the first rival by pytest-benchmark, the others in turn between its rounds.

    Attributes:
        rivals: the first one is ours.
        seconds: what each took, round by round.
    """

    rivals: list[Rival]
    rounds: int
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def run(self, benchmark: Any) -> None:
        """Runs all rounds; medians, ratios, bytes and GB/s go into the benchmark's extra info."""
        subject, *others = self.rivals
        self.seconds = {rival.name: [] for rival in others}

        def setup() -> None:
            for rival in others:
                rival.prepare()
                start = time.perf_counter()
                rival.run()
                self.seconds[rival.name].append(time.perf_counter() - start)
            subject.prepare()

        benchmark.pedantic(subject.run, setup=setup, rounds=self.rounds, warmup_rounds=2)
        self.seconds = {name: times[2:] for name, times in self.seconds.items()}
        self.seconds[subject.name] = list(benchmark.stats.stats.data)
        benchmark.extra_info["rows"] = [self._row(rival) for rival in self.rivals]

    def median_ms(self, name: str) -> float:
        """Median of one rival, in milliseconds."""
        return statistics.median(self.seconds[name]) * 1e3

    def _row(self, rival: Rival) -> dict[str, Any]:
        times = sorted(self.seconds[rival.name])
        median = statistics.median(times)
        return {
            "name": rival.name,
            "median_ms": median * 1e3,
            "low_ms": times[len(times) // 4] * 1e3,
            "high_ms": times[(3 * len(times)) // 4] * 1e3,
            "ratio": median / statistics.median(self.seconds[self.rivals[0].name]),
            "bytes": rival.moved_bytes,
            "gb_per_s": rival.moved_bytes / median / 1e9,
        }
