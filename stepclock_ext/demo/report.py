"""The last screen of a demo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stepclock_ext import StepClock

from .compare import Difference, Spread, WindowRecord, spread
from .files import DemoFiles
from .settings import DemoSettings
from .world import World

__all__ = ["DemoResult", "print_report"]


@dataclass(frozen=True)
class DemoResult:
    """What a demo did.

    Attributes:
        settings: what was run.
        world: the processes that ran it.
        files: where they lie.
        has_plot: the plot was drawn.
        num_text_bytes: of the text that batches are drawn from.
        num_parameters: of the model.
        clock: of the clocked run, at its end.
        records: every window, skipped ones too.
        loss_difference: largest of all windows.
        parameter_difference: largest at the end.
        seconds: from the settings to the last file.
    """

    settings: DemoSettings
    world: World
    files: DemoFiles
    has_plot: bool
    num_text_bytes: int
    num_parameters: int
    clock: StepClock
    records: Sequence[WindowRecord]
    loss_difference: Difference
    parameter_difference: Difference
    seconds: float


def print_report(result: DemoResult, *, console: Console) -> None:
    """Prints the last screen: 22 lines of up to 80 columns (a long name makes its line wider)."""
    settings, clock = result.settings, result.clock
    source = settings.text or "the Python standard library"
    lines = [
        "",
        f"Byte-level GPT, {result.num_parameters / 1e6:.1f} M parameters, seed {settings.seed}"
        + (f", {result.world.size} processes" if result.world.size > 1 else ""),
        f"on {result.num_text_bytes / 1e6:.1f} MB of {source}",
        f"update step {clock.update_step}, micro step {clock.micro_step}, "
        f"{clock.skipped_updates} skipped, {clock.weight_seen:,.0f} tokens, "
        f"loss scale {result.records[-1].info.loss_scale:,.0f}",
        "",
    ]
    _print_lines(lines, console)
    console.print(_table(result), highlight=False)
    lines = [
        f"update stretch: {_beginning(result.world)} -> parameters updated, gradients cleared;",
        "medians of all windows but the first, both loops taking turns",
        "",
        f"largest difference in loss        {_difference(result.loss_difference)}",
        f"largest difference in parameters  {_difference(result.parameter_difference)}",
        "(rounding starts it: the norm is fp64 here, fp32 there; training amplifies it)",
        "",
        *_files(result),
        f"{'all in':<12}{result.seconds:.0f} s",
    ]
    _print_lines(lines, console)


def _table(result: DemoResult) -> Table:
    records = result.records
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column(f"stepclock ({result.settings.backend})", justify="right", no_wrap=True)
    table.add_column(result.world.plain_name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for record in records[:1] if len(records) == 1 else (records[0], records[-1]):
        name = f"loss, update {record.info.update_step}"
        table.add_row(name, f"{record.info.loss:.4f}", f"{record.plain_loss:.4f}", "nats a byte")
    update = spread([record.update_ms for record in records])
    plain_update = spread([record.plain_update_ms for record in records])
    table.add_row("update stretch", *_medians(update, plain_update), style="bold")
    table.add_row("  middle half", _middle_half(update), _middle_half(plain_update), "")
    window = spread([record.window_ms for record in records])
    plain_window = spread([record.plain_window_ms for record in records])
    table.add_row("whole window", *_medians(window, plain_window))
    return table


def _beginning(world: World) -> str:
    """Of the update stretch; it holds the reduction, which several processes run in backward."""
    return "gradients complete" if world.size == 1 else "last backward begins"


def _difference(difference: Difference) -> str:
    return f"{difference.value:.1e} at {difference.where}"


def _medians(ours: Spread, theirs: Spread) -> tuple[str, str, str]:
    ratio = theirs.median / ours.median
    verdict = f"{ratio:.2f} x faster" if ratio >= 1 else f"{1 / ratio:.2f} x slower"
    return f"{ours.median:.2f} ms", f"{theirs.median:.2f} ms", verdict


def _middle_half(times: Spread) -> str:
    return f"{times.low:.2f} to {times.high:.2f}"


def _files(result: DemoResult) -> list[str]:
    files = result.files
    plot = str(files.plot)
    if not result.has_plot:
        plot = "left out, matplotlib is not installed; pip install 'stepclock_ext[plot]'"
    entries = {"run log": files.run_log, "checkpoint": files.checkpoint, "plot": plot}
    return [f"{name:<12}{value}" for name, value in entries.items()]


def _print_lines(lines: Sequence[str], console: Console) -> None:
    """As they are: no markup, no colours, and a long path stays in one line."""
    for line in lines:
        console.print(Text(line), soft_wrap=True)
