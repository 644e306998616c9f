"""The command line: options in, one line and exit status 2 for what cannot be done."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import stepclock_ext

from .doctor import print_doctor
from .fence_command import fence
from .plan_command import plan

__all__ = ["app", "main"]

QUICK_UPDATES = 8
EXIT_FAILED = 1
EXIT_USAGE = 2

app = typer.Typer(
    help="An optimizer wrapper for PyTorch that owns the clock of a training run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Runs the command and ends the process."""
    app(prog_name="stepclock")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"stepclock {stepclock_ext.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """An optimizer wrapper for PyTorch that owns the clock of a training run."""


@app.command()
def demo(
    updates: Annotated[
        int | None, typer.Option(help="Updates to train for [default: 80, with --quick 8].")
    ] = None,
    backend: Annotated[
        str, typer.Option(help="Who runs the kernels; `stepclock doctor` lists them.")
    ] = "auto",
    out: Annotated[Path, typer.Option(help="Folder of the files.")] = Path("stepclock-demo"),
    seed: Annotated[int, typer.Option(help="Of the weights and the order of the text.")] = 0,
    text: Annotated[
        Path | None, typer.Option(help="File to train on [default: Python's library].")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A look in under 15 seconds.")] = False,
) -> None:
    """Train a small GPT by the clock, beside the plain PyTorch loop; also under torchrun."""
    from stepclock_ext.demo import (
        DemoError,
        DemoSettings,
        OtherProcessError,
        joined_world,
        run_demo,
    )
    from stepclock_ext.demo.recipe import Recipe

    recipe = Recipe(updates=QUICK_UPDATES) if quick else Recipe()
    if updates is not None:
        recipe = replace(recipe, updates=updates)
    try:
        with joined_world() as world:
            settings = DemoSettings(out=out, text=text, seed=seed, backend=backend, recipe=recipe)
            run_demo(settings, console=Console(), world=world)
    except DemoError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(EXIT_USAGE) from error
    except OtherProcessError as error:
        raise typer.Exit(EXIT_FAILED) from error


@app.command()
def doctor() -> None:
    """Show which backends can be used here, and the versions at work."""
    print_doctor(Console())


app.command()(plan)
app.command()(fence)
