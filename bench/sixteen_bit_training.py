"""Trains the demo's model in fp32 and in several 16-bit ways, and shows how far each is from fp32.

``.venv/bin/python bench/sixteen_bit_training.py`` prints a table and writes it, every loss and a
plot to ``bench/results``. One thread: each run is the same to the bit wherever torch is the same.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from stepclock_ext import ClockedOptimizer
from stepclock_ext.demo.data import Batch, load_text, windows
from stepclock_ext.demo.model import ByteGPT, ModelShape
from stepclock_ext.demo.recipe import Recipe

__all__ = ["WAYS", "Curve", "Setting", "Way", "compare", "make_table", "train", "write_results"]

RESULTS = Path(__file__).parent / "results"
NAME = "sixteen_bit_training"


@dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        title: what the table calls it.
        seed: of the initial weights and of the order of the text.
        dtype: of the parameters, and so of activations and gradients.
        options: of `ClockedOptimizer`; None is the plain loop of PyTorch.
    """

    title: str
    seed: int = 0
    dtype: torch.dtype = torch.bfloat16
    options: dict[str, Any] | None = field(default_factory=dict)


BF16_SUMS = {"accumulate_dtype": torch.bfloat16}
# The first is the reference; the second shows how far apart two fp32 runs are that differ in luck.
WAYS = {
    "fp32_a": Way("fp32, seed 0: the reference", dtype=torch.float32),
    "fp32_b": Way("fp32, seed 1: the spread", seed=1, dtype=torch.float32),
    "masters": Way("bf16, fp32 sums, masters", options={"master_weights": True}),
    "bf16_sums": Way("bf16, bf16 sums, masters", options={"master_weights": True, **BF16_SUMS}),
    "stochastic": Way("bf16, fp32 sums, stochastic rounding", options={"rounding": "stochastic"}),
    "nearest": Way("bf16, fp32 sums, rounding to nearest"),
    "plain": Way("bf16, plain PyTorch: .grad, moments and weights in bf16", options=None),
}
REFERENCE, OTHER_SEED = list(WAYS)[:2]


@dataclass(frozen=True)
class Setting:
    """What all ways share.

    Attributes:
        shape: the model's sizes.
        recipe: the demo's, with longer windows and more updates.
        num_held_out: bytes at the end of the text that no run trains on.
        num_sequences: of these, in the fixed set that every evaluation takes.
        eval_every: updates between two evaluations.
        compared: updates at the end of the runs over which curves are compared.
    """

    shape: ModelShape = field(default_factory=lambda: ModelShape(64, 1, 4, 32))
    recipe: Recipe = field(default_factory=lambda: Recipe(300, accumulation_steps=64, sequences=1))
    num_held_out: int = 1 << 18
    num_sequences: int = 1024
    eval_every: int = 10
    compared: int = 100


@dataclass(frozen=True)
class Curve:
    """What one way of training gave.

    Attributes:
        updates: after which the model was evaluated; the first is 0.
        losses: on the fixed set, in fp32, with the parameters as they are (bf16 ones widened).
        moved: share of the elements whose value, masters included, that update changed.
    """

    updates: list[int]
    losses: list[float]
    moved: list[float]


# Runs the micro steps of one window and its update; gives what a parameter is worth, in fp32.
Loop = tuple[Callable[[Sequence[Batch]], None], Callable[[Tensor], Tensor]]


def plain_loop(model: ByteGPT, recipe: Recipe) -> Loop:
    """What one writes without a library: everything has the dtype of the parameters."""
    adamw = make_adamw(model, recipe)
    scheduler = LambdaLR(adamw, recipe.lr_factor)

    def run_window(batches: Sequence[Batch]) -> None:
        for inputs, targets in batches:
            loss = model.loss(inputs, targets) / len(batches)
            loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        adamw.step()
        scheduler.step()
        adamw.zero_grad(set_to_none=True)

    return run_window, Tensor.float


def clocked_loop(model: ByteGPT, recipe: Recipe, options: dict[str, Any]) -> Loop:
    """The same by `ClockedOptimizer`."""
    adamw = make_adamw(model, recipe)
    opt = ClockedOptimizer(
        adamw,
        gradient_accumulation_steps=recipe.accumulation_steps,
        max_grad_norm=recipe.max_grad_norm,
        schedulers=[LambdaLR(adamw, recipe.lr_factor)],
        nonfinite="raise",
        **options,
    )

    def run_window(batches: Sequence[Batch]) -> None:
        for inputs, targets in batches:
            opt.backward(model.loss(inputs, targets))
            opt.step()

    return run_window, opt.master_weight


def make_adamw(model: ByteGPT, recipe: Recipe) -> torch.optim.AdamW:
    """The demo's optimizer."""
    decay = recipe.weight_decay
    return torch.optim.AdamW(model.parameters(), recipe.learning_rate, recipe.betas, 1e-8, decay)


def make_data(setting: Setting, seed: int) -> tuple[Iterator[list[Batch]], Batch]:
    """Windows of micro batches in the order of `seed`, and the fixed set, the same for all."""
    recipe, context = setting.recipe, setting.shape.context
    text = load_text(None, context=context)
    kept, held_out = text[: -setting.num_held_out], text[-setting.num_held_out :]
    steps, sequences = recipe.accumulation_steps, recipe.sequences
    batches = windows(kept, micro_steps=steps, sequences=sequences, context=context, seed=seed)
    sequences = setting.num_sequences
    fixed = windows(held_out, micro_steps=1, sequences=sequences, context=context, seed=0)
    return batches, next(fixed)[0]


@torch.no_grad()
def evaluate(model: ByteGPT, fixed: Batch) -> float:
    """The loss of a copy of `model` in fp32."""
    return copy.deepcopy(model).float().loss(*fixed).item()


def train(way: Way, setting: Setting) -> Curve:
    """One run from its first weights to its last evaluation."""
    torch.manual_seed(way.seed)
    model = ByteGPT(setting.shape).to(way.dtype)
    batches, fixed = make_data(setting, way.seed)
    make = plain_loop if way.options is None else partial(clocked_loop, options=way.options)
    run_window, value = make(model, setting.recipe)
    updates, losses, moved = [0], [evaluate(model, fixed)], [0.0]
    for update, window in enumerate(islice(batches, setting.recipe.updates), start=1):
        is_due = update % setting.eval_every == 0
        before = [value(p).clone() for p in model.parameters() if is_due]
        run_window(window)
        if is_due:
            after = [value(p) for p in model.parameters()]
            num_moved = sum(int((x != y).sum()) for x, y in zip(before, after, strict=True))
            updates.append(update)
            losses.append(evaluate(model, fixed))
            moved.append(num_moved / model.num_parameters())
    return Curve(updates, losses, moved)


@dataclass(frozen=True)
class Distance:
    """How far a curve is from the reference at the end of the runs: absolute differences.

    Attributes:
        moved: share of the elements that an update changed, mean of the same updates.
        is_within: neither mean nor largest passes that of the other fp32 seed.
    """

    final_loss: float
    mean: float
    largest: float
    moved: float
    is_within: bool


def compare(curves: dict[str, Curve], setting: Setting) -> dict[str, Distance]:
    """The distance of every curve from the reference over the last updates."""
    reference = curves[REFERENCE]
    first = setting.recipe.updates - setting.compared
    tail = [i for i, update in enumerate(reference.updates) if update > first]

    def distances(curve: Curve) -> list[float]:
        return [abs(curve.losses[i] - reference.losses[i]) for i in tail]

    spread = distances(curves[OTHER_SEED])
    found = {}
    for name, curve in curves.items():
        apart = distances(curve)
        found[name] = Distance(
            final_loss=curve.losses[-1],
            mean=sum(apart) / len(apart),
            largest=max(apart),
            moved=sum(curve.moved[i] for i in tail) / len(tail),
            is_within=sum(apart) <= sum(spread) and max(apart) <= max(spread),
        )
    return found


def make_table(distances: dict[str, Distance]) -> str:
    """Markdown, one line for each way."""
    lines = [
        "| run | final loss | mean distance | largest | within the spread | elements moved |",
        "|---|---|---|---|---|---|",
    ]
    for name, d in distances.items():
        apart = ["", ""] if name == REFERENCE else [f"{d.mean:.4f}", f"{d.largest:.4f}"]
        verdict = "" if name in (REFERENCE, OTHER_SEED) else "yes" if d.is_within else "no"
        cells = [WAYS[name].title, f"{d.final_loss:.4f}", *apart, verdict, f"{100 * d.moved:.1f} %"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write_results(folder: Path, curves: dict[str, Curve], setting: Setting) -> None:
    """Writes the curves with what they came from, and the plot."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "setting": asdict(setting),
        "distances": {name: asdict(d) for name, d in compare(curves, setting).items()},
        "curves": {name: asdict(curve) for name, curve in curves.items()},
    }
    (folder / f"{NAME}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="ascii")
    save_plot(folder / f"{NAME}.svg", curves)


def save_plot(path: Path, curves: dict[str, Curve]) -> None:
    """An SVG: every loss, and below it the distance from the reference."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG  # needs no screen
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 8), layout="constrained")
    canvas: Any = FigureCanvasSVG(figure)
    loss, apart = figure.subplots(2, 1, sharex=True)
    reference = curves[REFERENCE].losses
    styles = ["k-", "k--", *(f"C{i}.-" for i in range(len(curves)))]
    for (name, curve), style in zip(curves.items(), styles, strict=False):
        loss.plot(curve.updates, curve.losses, style, label=WAYS[name].title, linewidth=1)
        if name != REFERENCE:
            pairs = zip(curve.losses, reference, strict=True)
            apart.plot(curve.updates, [abs(x - y) for x, y in pairs], style, linewidth=1)
    top = reference[len(reference) // 4]  # the first fall, in which all lie together, is cut off
    loss.set(ylabel="evaluation loss (nats a byte)", ylim=(None, top))
    apart.set(ylabel="distance from the reference", xlabel="update step", yscale="log")
    figure.legend(loc="outside upper center")
    for axes in (loss, apart):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": NAME}):
        canvas.print_svg(path, metadata={"Date": None})


def main() -> None:
    """Trains in every way, a line each, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    setting, curves = Setting(), {}
    for name, way in WAYS.items():
        start = time.perf_counter()
        curves[name] = train(way, setting)
        seconds = time.perf_counter() - start
        print(f"{way.title}: {curves[name].losses[-1]:.4f} in {seconds:.0f} s", flush=True)
    write_results(out, curves, setting)
    print(make_table(compare(curves, setting)))


if __name__ == "__main__":
    main()
