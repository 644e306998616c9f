"""`stepclock fence`: would this checkpoint resume under this configuration, and how."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from stepclock_ext import FenceReport, LRFence, TrainPlan
from stepclock_ext.checkpoint import latest_checkpoint
from stepclock_ext.checkpoint_files import is_folder
from stepclock_ext.checkpoint_files import read as read_checkpoint
from stepclock_ext.plan_files import read_yaml
from stepclock_ext.remap import REMAPS
from stepclock_ext.saved_run import SavedRun

from .plan_command import CommandError, check_picture, one_line_errors, read_count, reading

__all__ = ["fence"]

EXIT_REFUSED = 3
_AS_IS = "as_is"
_SCALINGS = ("linear", "sqrt")
# What belongs to the data and the machines, and is seldom in a configuration.
_OUTSIDE = ("dataset_size", "world_size")


def fence(
    checkpoint: Annotated[Path, typer.Argument(help="File, or folder for its latest one.")],
    config: Annotated[Path, typer.Argument(help="YAML of Trainer, ms-swift or LLaMA-Factory.")],
    dataset_size: Annotated[
        str | None,
        typer.Option(metavar="N", help="Samples in an epoch now [default: the checkpoint's]."),
    ] = None,
    world_size: Annotated[
        str | None, typer.Option(metavar="W", help="Ranks now [default: the checkpoint's].")
    ] = None,
    remap: Annotated[
        str | None, typer.Option(metavar="HOW", help=f"{', '.join(REMAPS)} or {_AS_IS}.")
    ] = None,
    lr_scaling: Annotated[
        str | None, typer.Option(metavar="RULE", help="linear or sqrt, along with --remap.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Picture of both curves.")
    ] = None,
) -> None:
    """Check whether a checkpoint would resume under a configuration: exit 0, or 3 if refused."""
    with one_line_errors("stepclock fence"):
        given = {
            "dataset_size": read_count("--dataset-size", dataset_size),
            "world_size": read_count("--world-size", world_size),
        }
        _check_remap(remap, lr_scaling)
        check_picture(plot)
        state = _read_state(checkpoint)
        plan, notes = _read_plan(config, given, state)
        asked = None if remap == _AS_IS else remap
        report = LRFence(plan).check(state, remap=asked, lr_scaling=lr_scaling)
        if plot is not None:
            _draw(report, plot)
    typer.echo(report.table(), nl=False)
    for note in notes:
        typer.echo(f"note: {note}")
    if report.differences and remap is None:
        typer.echo(_refusal(report), err=True)
        raise typer.Exit(EXIT_REFUSED)


def _refusal(report: FenceReport) -> str:
    return (
        f"stepclock fence: refused: other values of {', '.join(report.differences)}; pass --remap "
        f"{', '.join(REMAPS)} or {_AS_IS}"
    )


def _check_remap(remap: str | None, lr_scaling: str | None) -> None:
    if remap is not None and remap not in (*REMAPS, _AS_IS):
        allowed = ", ".join((*REMAPS, _AS_IS))
        raise CommandError(f"--remap must be one of {allowed}, got {remap!r}")
    if lr_scaling is not None and lr_scaling not in _SCALINGS:
        allowed = ", ".join(_SCALINGS)
        raise CommandError(
            f"--lr-scaling must be one of {allowed}, got {lr_scaling!r}; leave it out for none"
        )
    if lr_scaling is not None and remap not in REMAPS:
        raise CommandError(
            f"--lr-scaling must come with --remap {', '.join(REMAPS)}, got "
            f"{'no --remap' if remap is None else repr(remap)}; pass one of them, or leave it out"
        )


def _read_state(path: Path) -> Mapping[str, Any]:
    """The wrapper's state in a checkpoint, or in a file that `torch.save` made.

    Raises:
        ValueError: there is none.
    """
    file = path
    with reading("CHECKPOINT", path):
        if path.is_dir() and not is_folder(path):
            latest = latest_checkpoint(path)
            if latest is None:
                raise CommandError(
                    f"CHECKPOINT must hold a ckpt_step*.pt, got none in {path}; pass another folder"
                )
            file = latest
        plain = _read_plain(file)
        state = read_checkpoint(file)["optimizer"] if plain is None else plain
    if not isinstance(state, Mapping):
        raise CommandError(
            f"CHECKPOINT must hold an optimizer's state, got {type(state).__name__} in {file}"
        )
    return state


def _read_plain(path: Path) -> Mapping[str, Any] | None:
    """The wrapper's ``state_dict()``, alone or as "optimizer"; None for any other file."""
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's words for files of other programs
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # whatever torch says: `read_checkpoint` has better words for it
        return None
    if not isinstance(content, Mapping) or "format" in content:
        return None
    return next((part for part in (content, content.get("optimizer")) if _is_state(part)), None)


def _is_state(content: Any) -> bool:
    return isinstance(content, Mapping) and isinstance(content.get("stepclock"), Mapping)


def _read_plan(
    config: Path, given: Mapping[str, int | None], state: Mapping[str, Any]
) -> tuple[TrainPlan, list[str]]:
    """The plan now; what neither options nor file say of data and ranks is the checkpoint's."""
    saved = SavedRun.read(state).fingerprint
    with reading("CONFIG", config):
        settings = read_yaml(config)
        nested = settings.get("train_args")
        known = {**settings, **(nested if isinstance(nested, Mapping) else {})}
        arguments, notes = dict(given), []
        for name in _OUTSIDE:
            if arguments[name] is None and known.get(name) is None and saved.get(name) is not None:
                arguments[name] = saved[name]
                notes.append(
                    f"{name}={saved[name]} is the checkpoint's; --{name.replace('_', '-')} says "
                    "what it is now"
                )
        return TrainPlan.from_mapping(settings, **arguments), notes


def _draw(report: FenceReport, path: Path) -> None:
    try:
        report.plot(path)
    except OSError as error:
        raise CommandError(
            f"--plot must be a file that can be written, got {path} ({error.strerror}); pass "
            "another one"
        ) from error
