"""One demo from its settings to its last screen: the order of events."""

from __future__ import annotations

import copy
import time

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
from .data import load_text, windows
from .display import training_display
from .files import DemoFiles, must_write, prepare_folder, save_checkpoint
from .model import ByteGPT
from .plain import PlainRun
from .plot import save_plot
from .report import DemoResult, print_report
from .settings import DemoSettings
from .train import ClockedRun

__all__ = ["run_demo"]


def run_demo(settings: DemoSettings, *, console: Console) -> DemoResult:
    """Trains the model twice, in turns, writes the files and prints the last screen.

    The same settings give the same losses and parameters, bit for bit, on the same machine.

    Args:
        settings: what to run.
        console: where progress and the last screen go.

    Returns:
        What the last screen says.

    Raises:
        DemoError: the text cannot be used, or a file cannot be written.
        NonFiniteGradientError: ten updates in a row were skipped.
    """
    start = time.perf_counter()
    text = load_text(settings.text, context=settings.shape.context)
    files = prepare_folder(settings.out)
    clocked, plain = _make_runs(settings)
    records = _train(settings, clocked, plain, text, files, console)
    save_checkpoint(files.checkpoint, clocked)
    result = DemoResult(
        settings=settings,
        files=files,
        num_text_bytes=len(text),
        num_parameters=clocked.model.num_parameters(),
        clock=clocked.opt.clock,
        records=records,
        loss_difference=loss_difference(records),
        parameter_difference=parameter_difference(clocked.model, plain.model),
        has_plot=_has_plot(settings, files, records),
        seconds=time.perf_counter() - start,
    )
    print_report(result, console=console)
    return result


def _make_runs(settings: DemoSettings) -> tuple[ClockedRun, PlainRun]:
    """Both, from the same weights."""
    torch.manual_seed(settings.seed)
    model = ByteGPT(settings.shape)
    clocked = ClockedRun(copy.deepcopy(model), settings.recipe, backend=settings.backend)
    return clocked, PlainRun(model, settings.recipe)


def _train(
    settings: DemoSettings,
    clocked: ClockedRun,
    plain: PlainRun,
    text: Tensor,
    files: DemoFiles,
    console: Console,
) -> list[WindowRecord]:
    """Runs both to the horizon; each window is logged and shown."""
    recipe = settings.recipe
    batches = windows(
        text,
        micro_steps=recipe.accumulation_steps,
        sequences=recipe.sequences,
        context=settings.shape.context,
        seed=settings.seed,
    )
    records = []
    with (
        must_write(files.run_log),
        RunLog(files.run_log) as log,
        training_display(console, updates=recipe.updates) as show,
    ):
        for record in run_in_turns(clocked, plain, batches, updates=recipe.updates):
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


def _has_plot(settings: DemoSettings, files: DemoFiles, records: list[WindowRecord]) -> bool:
    """Draws the plot; False where matplotlib is not installed."""
    try:
        save_plot(files.plot, records, settings.recipe)
    except ImportError:
        return False
    return True
