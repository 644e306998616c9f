"""`stepclock plan`: what a configuration comes to, before anything is trained."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stepclock_ext import TrainPlan
from stepclock_ext.memory import MemoryLedger

__all__ = ["CommandError", "check_picture", "one_line_errors", "plan", "read_count", "reading"]

EXIT_USAGE = 2
_POINTS = 1000  # of a plotted curve, at most
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
# What a file with wrong values in it raises; OverflowError and RecursionError come from YAML that
# is too large or too deep.
_WRONG = (TypeError, ValueError, OverflowError, RecursionError)


class CommandError(ValueError):
    """A choice that cannot be followed; its message is one line for the user."""


def plan(
    config: Annotated[Path, typer.Argument(help="YAML of Trainer, ms-swift or LLaMA-Factory.")],
    dataset_size: Annotated[
        str | None, typer.Option(metavar="N", help="Samples in an epoch, over all ranks.")
    ] = None,
    world_size: Annotated[
        str | None, typer.Option(metavar="W", help="Ranks that read different data.")
    ] = None,
    params: Annotated[
        str | None,
        typer.Option(metavar="P", help="Parameters, as 7e9 or 7B: adds the memory ledger."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Picture of the learning rate.")
    ] = None,
) -> None:
    """Count updates, warm-up and landing of a configuration, before the run."""
    with one_line_errors("stepclock plan"):
        given = {
            "dataset_size": read_count("--dataset-size", dataset_size),
            "world_size": read_count("--world-size", world_size),
        }
        num_params = _read_params(params)
        check_picture(plot)
        with reading("CONFIG", config):
            counted = TrainPlan.from_yaml(config, **given)
        if plot is not None:
            _draw(counted, plot)
        _print(Console(), counted, num_params)


@contextmanager
def one_line_errors(command: str) -> Iterator[None]:
    """Whatever a wrong choice raises inside becomes one line on stderr and exit status 2."""
    try:
        yield
    except _WRONG as error:
        # the class or function that an error comes from is nothing to a user of the command
        message = re.sub(r"^[\w.]+: ", "", " ".join(str(error).split()))
        typer.echo(f"{command}: {message}", err=True)
        raise typer.Exit(EXIT_USAGE) from error


@contextmanager
def reading(name: str, path: Path) -> Iterator[None]:
    """Says of a file that cannot be opened, or that nests too deep, which one it is.

    Raises:
        CommandError: one of these happened inside.
    """
    try:
        yield
    except OSError as error:
        raise CommandError(
            f"{name} must be a file that can be read, got {path} ({error.strerror or error}); "
            "pass another one"
        ) from error
    except RecursionError as error:
        raise CommandError(f"{name} must nest a few levels deep at most, got {path}") from error


def read_count(option: str, text: str | None) -> int | None:
    """A positive whole number, as 24000 or 24_000.

    Raises:
        CommandError: it is something else.
    """
    if text is None:
        return None
    if not re.fullmatch(r"\d{1,3}(_?\d{3}){0,5}|\d{1,18}", text, re.ASCII) or not int(text):
        raise CommandError(
            f"{option} must be a positive whole number, got {text!r}; write it as 24000"
        )
    return int(text)


def _read_params(text: str | None) -> int | None:
    """A number of parameters, as 7000000000, 7e9 or 7B.

    Example:
        >>> _read_params("7B"), _read_params("1.5e9"), _read_params("350M")
        (7000000000, 1500000000, 350000000)
    """
    if text is None:
        return None
    number = r"(\d[\d_]{0,20}(?:\.\d{1,20})?(?:e\+?\d{1,2})?)([kmbt]?)"
    match = re.fullmatch(number, text.lower(), re.ASCII)
    digits, unit = (match[1].replace("_", ""), match[2]) if match else ("0", "")
    count = Fraction(digits) * _UNITS[unit]
    if count < 1 or count.denominator != 1:
        raise CommandError(
            f"--params must be a positive whole number, got {text!r}; write it as 7e9 or 7B"
        )
    return int(count)


def check_picture(path: Path | None) -> None:
    """Refuses a picture that is not to be a PNG, or cannot be drawn here.

    Raises:
        CommandError: one of these.
    """
    if path is None:
        return
    if path.suffix.lower() != ".png":
        raise CommandError(f"--plot must be a file that ends in .png, got {path}; rename it")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise CommandError(
            "--plot needs matplotlib, got none; pip install 'stepclock_ext[plot]', or leave it out"
        ) from error


def _draw(counted: TrainPlan, path: Path) -> None:
    """Writes the curve as a PNG; matplotlib is here, see `check_picture`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # needs no screen
    from matplotlib.figure import Figure

    total, warmup = counted.total_updates, counted.warmup_updates
    stride = max(1, total // _POINTS)
    updates = sorted({*range(1, total, stride), total, *([warmup] if warmup else [])})
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    canvas: Any = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(updates, [counted.lr_at(update) for update in updates])
    axes.set(xlabel="update", ylabel="learning rate", title=counted.lr_scheduler_type)
    axes.grid(alpha=0.3)
    picture = io.BytesIO()
    canvas.print_png(picture)
    try:
        path.write_bytes(picture.getvalue())
    except OSError as error:
        raise CommandError(
            f"--plot must be a file that can be written, got {path} ({error.strerror}); pass "
            "another one"
        ) from error


def _print(console: Console, counted: TrainPlan, num_params: int | None) -> None:
    table = Table("plan", "value", title_justify="left")
    for name, value in _rows(counted):
        table.add_row(name, Text(value))
    console.print(table)
    notes = counted.notes()
    if num_params is not None:
        ledger = MemoryLedger.of(
            num_params, gradient_accumulation_steps=counted.gradient_accumulation_steps
        )
        memory = Table("memory of a rank", "bytes", title_justify="left")
        memory.columns[1].justify = "right"
        for name, size in (*ledger.rows(), ("total", ledger.total_bytes)):
            memory.add_row(name, f"{size:,}")
        console.print(memory)
        notes.append(
            f"the ledger is of AdamW with {num_params:,} parameters in fp32, all of them trained "
            "and held by each rank; activations are not in it"
        )
    for note in notes:
        console.print(Text(f"note: {note}"), soft_wrap=True)


def _rows(counted: TrainPlan) -> Iterator[tuple[str, str]]:
    if counted.source is not None:
        yield "configuration", counted.source.system
    yield "dataset size", _count(counted.dataset_size)
    sizes = (
        counted.per_device_train_batch_size,
        counted.gradient_accumulation_steps,
        counted.world_size,
    )
    yield "per-device batch", f"{sizes[0]:,}"
    yield "accumulation", f"{sizes[1]:,}"
    yield "world size", f"{sizes[2]:,}"
    yield "effective batch", f"{counted.effective_batch_size:,}"
    yield "micro steps an epoch", _count(counted.micro_steps_per_epoch)
    yield "updates an epoch", _count(counted.updates_per_epoch)
    yield "epochs begun", _count(counted.num_epochs)
    yield "updates in all", f"{counted.total_updates:,}"
    yield "schedule", counted.lr_scheduler_type
    yield "peak", f"{counted.learning_rate:g}"
    yield "warm-up", _warmup(counted)
    last = f"update {counted.total_updates:,}, rate {counted.lr_at(counted.total_updates):g}"
    yield "landing", last if counted.schedule.lands else f"none; {last}"


def _warmup(counted: TrainPlan) -> str:
    warmup = counted.warmup_updates
    share = warmup / counted.total_updates
    return f"updates 1 to {warmup:,} ({share:.1%} of the run)" if warmup else "none"


def _count(count: int | None) -> str:
    return "unknown" if count is None else f"{count:,}"
