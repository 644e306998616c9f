"""The picture of a run: loss, learning rate and gradient norm over update steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .compare import WindowRecord
from .files import replacing
from .recipe import Recipe

__all__ = ["save_plot"]


def save_plot(
    path: Path, records: Sequence[WindowRecord], recipe: Recipe, *, plain_name: str
) -> None:
    """Writes a PNG, 1200 x 1050 pixels; skipped updates are left out.

    Raises:
        ImportError: matplotlib is not installed.
        DemoError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # needs no screen
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7), dpi=150, layout="constrained")
    canvas: Any = FigureCanvasAgg(figure)
    _draw(figure, [record for record in records if record.info.updated], recipe, plain_name)
    with replacing(path) as file:
        canvas.print_png(file)


def _draw(figure: Any, records: Sequence[WindowRecord], recipe: Recipe, plain_name: str) -> None:
    steps = [record.info.update_step for record in records]
    marker = "." if len(steps) <= 30 else ""
    loss, rate, norm = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 1))
    losses = [record.info.loss for record in records]
    loss.plot(steps, losses, marker=marker, linewidth=2.5, label="stepclock")
    plain = [record.plain_loss for record in records]
    loss.plot(steps, plain, linestyle="--", linewidth=1.0, color="black", label=plain_name)
    loss.set(ylabel="loss (nats a byte)", title="stepclock demo: both runs from one seed")
    loss.legend(frameon=False)
    rate.plot(steps, [record.info.lr[0] for record in records], marker=marker, color="C2")
    rate.set(ylabel="learning rate", ylim=(0, 1.05 * recipe.learning_rate))
    norm.plot(steps, [record.info.grad_norm for record in records], marker=marker, color="C1")
    limit = recipe.max_grad_norm
    norm.axhline(limit, color="black", linewidth=0.8, linestyle=":", label=f"clip at {limit:g}")
    norm.set(ylabel="gradient norm", xlabel="update step", yscale="log")
    norm.legend(frameon=False)
    norm.xaxis.get_major_locator().set_params(integer=True)
    for axes in (loss, rate, norm):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
