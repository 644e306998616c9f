"""Advice about a plan, and which of its arguments won. Nothing here changes a plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .schedules import LANDING_KINDS

if TYPE_CHECKING:
    from .plan import TrainPlan

__all__ = ["notes_of"]

_SMALL_DATASET = 10_000  # samples
_LONG_WINDOW = 32  # micro steps
_LINEAR_LIMIT = 8  # times the old effective batch


def notes_of(plan: TrainPlan, *, lora: bool | None, old_batch_size: int | None) -> list[str]:
    """Everything there is to say, from the file to the advice; see `TrainPlan.notes`."""
    source = plan.source
    if lora is None:
        lora = source is not None and source.lora
    notes = [] if source is None else list(source.notes)
    notes += _winners(plan)
    notes += _unused(plan)
    notes += _warmup(plan, lora)
    notes += _window(plan)
    if old_batch_size is not None:
        notes += _batch(plan, old_batch_size)
    return notes


def _winners(plan: TrainPlan) -> Iterator[str]:
    if plan.max_steps > 0 and plan.num_train_epochs is not None:
        yield (
            f"max_steps={plan.max_steps} wins over num_train_epochs={plan.num_train_epochs:g}"
            + ("" if plan.num_epochs is None else f": it takes {plan.num_epochs} epochs")
        )
    if plan.warmup_steps and plan.warmup_ratio and plan.lr_scheduler_type != "constant":
        yield (
            f"warmup_steps={plan.warmup_steps} wins over warmup_ratio={plan.warmup_ratio:g}: "
            f"warm-up is {plan.warmup_updates} updates"
        )


def _unused(plan: TrainPlan) -> Iterator[str]:
    kind = plan.lr_scheduler_type
    if kind == "constant" and (plan.warmup_steps or plan.warmup_ratio):
        yield "'constant' has no warm-up; 'constant_with_warmup' has one"
    elif plan.warmup_updates == plan.total_updates:
        yield "warm-up is as long as the run, which ends at the peak and does not land"
    if kind not in LANDING_KINDS and plan.min_lr:
        yield f"{kind!r} does not land: min_lr={plan.min_lr:g} is not reached"


def _warmup(plan: TrainPlan, lora: bool) -> Iterator[str]:
    if plan.lr_scheduler_type == "constant":
        return
    low, high, of_what = 0.03, 0.10, "a run"
    if lora:
        low, high, of_what = 0.10, 0.15, "LoRA"
    elif plan.dataset_size is not None and plan.dataset_size < _SMALL_DATASET:
        low, high, of_what = 0.05, 0.08, f"fewer than {_SMALL_DATASET:,} samples"
    # half an update either way: the share of a short run can be no finer
    slack = 0.5 / plan.total_updates
    share = plan.warmup_updates / plan.total_updates
    if not low - slack <= share <= high + slack:
        yield (
            f"warm-up is {plan.warmup_updates} of {plan.total_updates} updates ({share:.1%}); "
            f"{low:.0%} to {high:.0%} is usual for {of_what}"
        )


def _window(plan: TrainPlan) -> Iterator[str]:
    steps = plan.gradient_accumulation_steps
    if steps > _LONG_WINDOW:
        yield (
            f"gradient_accumulation_steps={steps} leaves {plan.total_updates} updates; past "
            f"{_LONG_WINDOW} a run has few, so a larger micro batch is worth trying"
        )


def _batch(plan: TrainPlan, old: int) -> Iterator[str]:
    new = plan.effective_batch_size
    if new == old:
        return
    linear = plan.scaled_learning_rate(old, "linear")
    root = plan.scaled_learning_rate(old, "sqrt")
    times = max(new / old, old / new)
    rule = "linear" if times <= _LINEAR_LIMIT else "square root"
    yield (
        f"effective batch {new} instead of {old}: the {rule} rule is usual for a change of "
        f"{times:g} times (linear up to {_LINEAR_LIMIT}); learning_rate={plan.learning_rate:g} "
        f"would be {linear:g} by the linear and {root:g} by the square root rule"
    )
