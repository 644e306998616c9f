"""What the fence found: as values, as a table, as a picture."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .plan_scheduler import Curve
from .saved_run import SavedRun

__all__ = ["FenceReport"]

_PLOTTED = 1000  # points of a curve, at most


@dataclass(frozen=True, kw_only=True)
class FenceReport:
    """A saved run beside the plan now.

    Attributes:
        differences: name -> (saved, now); "unknown" where the checkpoint does not say.
        update_step: updates done; None if the checkpoint does not say.
        remaining_updates: what the plan now has left at the saved place in the data; None without
            a plan.
        total_updates: the last update: done and remaining together.
        warmup_interval: its first and last update; None without warm-up.
        landing: the last update and its rate; of a curve that does not land too.
        lr_before: the last rates that were used, up to 200.
        lr_after: the first ones that come, up to 200: of the remapped curve; where none was asked
            for, those that the plan now would give to the saved counter.
        remap: the remap that was asked for.
        factor: by which it multiplies the rest of the curve.
        notes: what the user should know of it.
        run: the saved run, as `remap` takes it.
    """

    differences: Mapping[str, tuple[Any, Any]]
    update_step: int | None = None
    remaining_updates: int | None = None
    total_updates: int | None = None
    warmup_interval: tuple[int, int] | None = None
    landing: tuple[int, float] | None = None
    lr_before: tuple[float, ...] = ()
    lr_after: tuple[float, ...] = ()
    remap: str | None = None
    factor: float = 1.0
    notes: tuple[str, ...] = ()
    run: SavedRun = field(repr=False)
    curve: Curve | None = field(repr=False, default=None)

    @property
    def matches(self) -> bool:
        """Whether the run can go on as it was."""
        return not self.differences

    @property
    def jump(self) -> float | None:
        """The first rate after over the last one before; None where one of them is not known."""
        if not self.lr_before or not self.lr_after or not self.lr_before[-1]:
            return None
        return self.lr_after[0] / self.lr_before[-1]

    def table(self) -> str:
        """The report as text: what differs, then what becomes of the learning rate."""
        from rich import box
        from rich.console import Console
        from rich.table import Table

        out = io.StringIO()
        console = Console(file=out, width=100, color_system=None, legacy_windows=False)
        verdict = "the plan is the saved one" if self.matches else "the plan is not the saved one"
        differences = Table("setting", "saved", "now", box=box.ASCII, title=f"LR Fence: {verdict}")
        for name, (saved, now) in self.differences.items():
            differences.add_row(name, _text(saved), _text(now))
        if self.differences:
            console.print(differences)
        else:
            console.print(f"LR Fence: {verdict}")
        outlook = Table("learning rate", "value", box=box.ASCII)
        for name, value in self._rows():
            outlook.add_row(name, value)
        console.print(outlook)
        for note in self.notes:
            console.print(f"note: {note}", markup=False, highlight=False)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"

    def _rows(self) -> Iterator[tuple[str, str]]:
        yield "updates done", _text(self.update_step)
        yield "updates remaining", _text(self.remaining_updates)
        yield "updates in all", _text(self.total_updates)
        if self.warmup_interval is not None:
            yield "warm-up", "updates {} to {}".format(*self.warmup_interval)
        else:
            yield "warm-up", "none"
        if self.landing is not None:
            yield "landing", "update {}, rate {:.6g}".format(*self.landing)
        yield "last rates before", _rates(self.lr_before[-3:])
        yield f"first rates after ({self.remap or 'no remap'})", _rates(self.lr_after[:3])
        if self.jump is not None:
            yield "first after / last before", f"{self.jump:.4f}"

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Writes a picture of both curves; the kind of file is that of the name.

        Raises:
            RuntimeError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as e:
            raise RuntimeError(
                "FenceReport.plot: matplotlib must be installed, got none; "
                "pip install stepclock_ext[plot]"
            ) from e
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot()
        if self.run.curve is not None:
            axes.plot(*_points(self.run.curve, 1), "--", color="0.5", label="saved")
        if self.curve is not None:
            first = (self.update_step or 0) + 1
            axes.plot(*_points(self.curve, first), label=self.remap or "now, no remap")
        if self.update_step is not None:
            axes.axvline(self.update_step, color="0.7", linewidth=0.8)
        axes.set_xlabel("update")
        axes.set_ylabel("learning rate")
        if axes.lines:
            axes.legend()
        figure.savefig(path)


def _points(curve: Curve, first: int) -> tuple[list[int], list[float]]:
    last = max(first, curve.total_updates)
    step = max(1, (last - first) // _PLOTTED)
    updates = [*range(first, last, step), last]
    return updates, [curve.lr_at(update) for update in updates]


def _text(value: Any) -> str:
    return "unknown" if value is None else f"{value:.6g}" if type(value) is float else str(value)


def _rates(rates: tuple[float, ...]) -> str:
    return ", ".join(f"{rate:.6g}" for rate in rates) or "unknown"
