"""One demo from its settings to its last screen: the order of events."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Iterator

import torch
from rich.console import Console
from torch import Tensor

from stepclock_ext.runlog import RunLog

from .compare import (
    WindowRecord,
    loss_difference,
    parameter_difference,
    run_in_turns,
)
from .data import Batch, load_text, windows
from .display import training_display
from .files import DemoFiles, must_write, prepare_folder, save_checkpoint
from .model import ByteGPT
from .plain import PlainRun
from .plot import save_plot
from .report import DemoResult, print_report
from .settings import DemoSettings
from .train import ClockedRun
from .world import ALONE, World

__all__ = ["run_demo"]


def run_demo(
    settings: DemoSettings, *, console: Console, world: World = ALONE
) -> DemoResult | None:
    """Trains the model twice, in turns, writes the files and prints the last screen.

    The same settings give the same losses and parameters, bit for bit, on the same machine with as
    many processes.

    Args:
        settings: what to run.
        console: where progress and the last screen go.
        world: the processes that run it together; each calls this.

    Returns:
        What the last screen says; None in processes other than the first.

    Raises:
        DemoError: the text cannot be used, or a file cannot be written; or the processes do not
            fit the window or one another.
        NonFiniteGradientError: ten updates in a row were skipped.
    """
    start = time.perf_counter()
    world.check_share(settings.recipe.accumulation_steps)
    text = load_text(settings.text, context=settings.shape.context)
    world.check_same(settings, text)
    files = prepare_folder(settings.out) if world.is_first else None
    clocked, plain = _make_runs(settings, world)
    passing = run_in_turns(
        clocked,
        plain,
        _batches(settings, text),
        updates=settings.recipe.updates,
        world=world,
    )
    if files is None:
        deque(passing, maxlen=0)
        return None
    records = _watch(passing, files, console, updates=settings.recipe.updates)
    save_checkpoint(files.checkpoint, clocked)
    result = DemoResult(
        settings=settings,
        world=world,
        files=files,
        num_text_bytes=len(text),
        num_parameters=clocked.model.num_parameters(),
        clock=clocked.opt.clock,
        records=records,
        loss_difference=loss_difference(records),
        parameter_difference=parameter_difference(clocked.model, plain.model),
        has_plot=_has_plot(settings, world, files, records),
        seconds=time.perf_counter() - start,
    )
    print_report(result, console=console)
    return result


def _make_runs(settings: DemoSettings, world: World) -> tuple[ClockedRun, PlainRun]:
    """Both, from the same weights."""
    torch.manual_seed(settings.seed)
    model, recipe = ByteGPT(settings.shape), settings.recipe
    clocked = ClockedRun(copy.deepcopy(model), recipe, backend=settings.backend, world=world)
    return clocked, PlainRun(model, recipe, world=world)


def _batches(settings: DemoSettings, text: Tensor) -> Iterator[list[Batch]]:
    """The same windows in every process."""
    return windows(
        text,
        micro_steps=settings.recipe.accumulation_steps,
        sequences=settings.recipe.sequences,
        context=settings.shape.context,
        seed=settings.seed,
    )


def _watch(
    passing: Iterator[WindowRecord], files: DemoFiles, console: Console, *, updates: int
) -> list[WindowRecord]:
    """Runs to the horizon; each window is logged and shown."""
    records = []
    with (
        must_write(files.run_log),
        RunLog(files.run_log) as log,
        training_display(console, updates=updates) as show,
    ):
        for record in passing:
            log.write(
                record.info,
                plain_loss=record.plain_loss,
                tokens=record.tokens,
                tokens_per_second=record.tokens_per_second,
                update_ms=record.update_ms,
                plain_update_ms=record.plain_update_ms,
            )
            show(record)
            records.append(record)
    return records


def _has_plot(
    settings: DemoSettings, world: World, files: DemoFiles, records: list[WindowRecord]
) -> bool:
    """Draws the plot; False where matplotlib is not installed."""
    try:
        save_plot(files.plot, records, settings.recipe, plain_name=world.plain_name)
    except ImportError:
        return False
    return True
