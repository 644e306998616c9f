"""How far a demo is: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from .compare import WindowRecord

__all__ = ["training_display"]

NUM_LINES = 10


@contextmanager
def training_display(console: Console, *, updates: int) -> Iterator[Callable[[WindowRecord], None]]:
    """Yields what to call after each window. No control codes where there is no terminal."""
    if not console.is_terminal:
        yield _Lines(console, updates)
        return
    columns = (
        TextColumn("update {task.completed}/{task.total}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[status]}"),
    )
    with Progress(*columns, console=console, expand=True) as progress:
        task = progress.add_task("", total=updates, status="first window")
        yield _Bar(progress, task)


class _Bar:
    """Moves a bar, every time."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def __call__(self, record: WindowRecord) -> None:
        step = record.info.update_step
        self._progress.update(self._task, completed=step, status=_status(record))


class _Lines:
    """Prints a line, some ten times in all."""

    def __init__(self, console: Console, updates: int) -> None:
        self._console, self._updates = console, updates
        self._every = max(1, updates // NUM_LINES)

    def __call__(self, record: WindowRecord) -> None:
        step = record.info.update_step
        if record.info.skipped or step == 1 or step % self._every == 0 or step == self._updates:
            line = f"update {step}/{self._updates}  {_status(record)}"
            self._console.print(line, markup=False, highlight=False)


def _status(record: WindowRecord) -> str:
    info = record.info
    if info.skipped:
        return f"skipped, gradient norm {info.grad_norm:g} at loss scale {info.loss_scale:g}"
    return (
        f"loss {info.loss:.3f}  lr {info.lr[0]:.2e}  norm {info.grad_norm:5.2f}  "
        f"{record.tokens_per_second:,.0f} tokens/s"
    )
