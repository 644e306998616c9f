"""The largest micro batch that fits into memory, and the accumulation that goes with it."""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["BatchSize", "Trial", "find_batch_size"]

_WHERE = "find_batch_size"
# How allocators that raise a plain RuntimeError say it.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed")


@dataclass(frozen=True)
class Trial:
    """One batch size that was tried; `peak_bytes` is None where the memory did not suffice."""

    batch_size: int
    peak_bytes: int | None


@dataclass(frozen=True)
class BatchSize:
    """What `find_batch_size` found; the names are those of `TrainPlan`.

    Attributes:
        per_device_train_batch_size: the largest that stayed within the limit.
        gradient_accumulation_steps: micro steps that make the effective batch.
        budget_bytes: what the limit was a share of.
        trials: in the order in which they ran.
    """

    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    budget_bytes: int
    trials: tuple[Trial, ...]


def find_batch_size(
    step: Callable[[int], object],
    *,
    start: int = 1,
    effective_batch_size: int | None = None,
    world_size: int = 1,
    budget_bytes: int | None = None,
    iterations: int = 20,
    limit: float = 0.85,
    max_batch_size: int | None = None,
    measure: Callable[[], int] | None = None,
) -> BatchSize:
    """Doubles the micro batch while its peak stays within a share of the budget::

        for batch in start, 2 * start, 4 * start ...
            iterations times: step(batch), peak = max(peak, measure())
            out of memory, or peak > limit * budget: the batch before is the answer

    Doubling ends as well at `max_batch_size`, and where `effective_batch_size` is no longer a
    multiple. `step` trains: give it a copy of the model, or load a checkpoint afterwards. A step
    that ran out of memory leaves its window open, which ``discard()`` clears.

    Args:
        step: runs forward, backward and update on as many samples.
        start: the first batch size; it must fit.
        effective_batch_size: samples in an update over all ranks, kept by accumulation; None
            accumulates nothing.
        world_size: ranks.
        budget_bytes: the memory there is; None is that of the CUDA device.
        iterations: steps for each size; allocators need some to come to rest.
        limit: share of the budget that a peak may take.
        max_batch_size: no larger one is tried.
        measure: gives the bytes in use, or their peak in this trial. None asks CUDA for its peak of
            reserved memory, and on a CPU how much the process has grown since the beginning.

    Raises:
        TypeError, ValueError: an argument is outside its range, or `start` does not fit.

    Example:
        >>> taken = 0
        >>> def step(batch_size):
        ...     global taken
        ...     taken = 1000 + 100 * batch_size
        >>> found = find_batch_size(
        ...     step, effective_batch_size=96, budget_bytes=5000, measure=lambda: taken
        ... )
        >>> found.per_device_train_batch_size, found.gradient_accumulation_steps
        (32, 3)
        >>> found.trials[-1]
        Trial(batch_size=32, peak_bytes=4200)
    """
    _check_arguments(start, world_size, iterations, limit, effective_batch_size, max_batch_size)
    gauge = _Gauge(measure)
    budget = _find_budget(budget_bytes, measure)
    allowed = limit * budget
    trials: list[Trial] = []
    batch, fits = start, 0
    while batch <= (max_batch_size or batch) and _divides(batch * world_size, effective_batch_size):
        peak = _try(step, batch, iterations, gauge, allowed)
        trials.append(Trial(batch, peak))
        if peak is None or peak > allowed:
            break
        fits, batch = batch, 2 * batch
    if not fits:
        raise ValueError(
            f"{_WHERE}: start must fit into {limit} of {budget:,} bytes, got {trials[0]}; pass a "
            "smaller start"
        )
    steps = 1 if effective_batch_size is None else effective_batch_size // (fits * world_size)
    return BatchSize(fits, steps, budget, tuple(trials))


def _divides(ranks_batch: int, effective: int | None) -> bool:
    return effective is None or effective % ranks_batch == 0


def _try(
    step: Callable[[int], object], batch: int, iterations: int, gauge: _Gauge, allowed: float
) -> int | None:
    """The peak of some steps, cut short once it is too large; None if the memory ran out."""
    gauge.reset()
    peak = 0
    try:
        for _ in range(iterations):
            step(batch)
            peak = max(peak, gauge.read())
            if peak > allowed:
                break
    except (MemoryError, RuntimeError) as e:
        if not _is_out_of_memory(e):
            raise
        peak = -1
    if peak < 0:  # outside the except clause: there, the traceback holds what the step allocated
        gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None if peak < 0 else peak


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error).lower()
    return any(words in text for words in _OUT_OF_MEMORY)


class _Gauge:
    """Bytes in use at the worst moment since `reset`."""

    def __init__(self, measure: Callable[[], int] | None) -> None:
        self._measure = measure
        self._on_cuda = measure is None and torch.cuda.is_available()
        self._baseline = 0
        if measure is None and not self._on_cuda:
            self.reset()
            self._baseline = _peak_rss()

    def reset(self) -> None:
        """A trial begins."""
        if self._on_cuda:
            torch.cuda.reset_peak_memory_stats()
        elif self._measure is None:
            # Linux lets a process forget its peak; elsewhere peaks only grow, as batches do.
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")

    def read(self) -> int:
        """The peak so far."""
        if self._measure is not None:
            return int(self._measure())
        if self._on_cuda:
            return torch.cuda.max_memory_reserved()
        return max(0, _peak_rss() - self._baseline)


def _peak_rss() -> int:
    """The most memory that this process had since its peak was reset."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _find_budget(budget_bytes: int | None, measure: Callable[[], int] | None) -> int:
    if budget_bytes is not None:
        return _check_count("budget_bytes", budget_bytes)
    if measure is None and torch.cuda.is_available():
        return torch.cuda.mem_get_info()[1]
    raise ValueError(
        f"{_WHERE}: budget_bytes must be given where CUDA does not measure, got None; pass the "
        "bytes that training may take"
    )


def _check_arguments(
    start: int,
    world_size: int,
    iterations: int,
    limit: float,
    effective: int | None,
    max_batch_size: int | None,
) -> None:
    counts = {"start": start, "world_size": world_size, "iterations": iterations}
    optional = {"effective_batch_size": effective, "max_batch_size": max_batch_size}
    counts |= {name: value for name, value in optional.items() if value is not None}
    for name, value in counts.items():
        _check_count(name, value)
    if not 0 < limit <= 1:
        raise ValueError(f"{_WHERE}: limit must be above 0 and at most 1, got {limit!r}")
    if effective is not None and effective % (start * world_size):
        raise ValueError(
            f"{_WHERE}: effective_batch_size must be a multiple of start * world_size = "
            f"{start * world_size}, got {effective}; change one of them"
        )
    if max_batch_size is not None and max_batch_size < start:
        raise ValueError(
            f"{_WHERE}: max_batch_size must be start = {start} or more, got {max_batch_size}"
        )


def _check_count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{_WHERE}: {name} must be an integer, got {value!r}")
    if value < 1:
        raise ValueError(f"{_WHERE}: {name} must be 1 or more, got {value}")
    return value
