"""The door of a plan: one check for each argument, one clear error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .schedules import SHAPE_PARAMETERS, check_kind, check_rates, check_shape

if TYPE_CHECKING:
    from .plan import TrainPlan

__all__ = ["check_arguments", "check_totals", "solve_accumulation"]

_WHERE = "TrainPlan"
_TAILS = ("flush", "carry", "drop")


def check_arguments(plan: TrainPlan) -> None:
    """Refuses an argument that is outside its range, whatever the others are."""
    if plan.dataset_size is not None:
        _check_count("dataset_size", plan.dataset_size, "pass None for a loader without a length")
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "world_size"):
        _check_count(name, getattr(plan, name), "1 is the least")
    _check_length(plan)
    check_kind(_WHERE, "lr_scheduler_type", plan.lr_scheduler_type)
    check_rates(_WHERE, plan.learning_rate, plan.min_lr)
    _check_warmup(plan)
    for name in ("dataloader_drop_last", "sampler_drop_last"):
        if not isinstance(getattr(plan, name), bool):
            raise TypeError(f"{_WHERE}: {name} must be True or False, got {getattr(plan, name)!r}")
    if plan.tail not in _TAILS:
        raise ValueError(f"{_WHERE}: tail must be one of {', '.join(_TAILS)}, got {plan.tail!r}")
    if not isinstance(plan.lr_scheduler_kwargs, Mapping):
        raise TypeError(
            f"{_WHERE}: lr_scheduler_kwargs must be a mapping, got {plan.lr_scheduler_kwargs!r}"
        )


def check_totals(plan: TrainPlan) -> None:
    """Refuses a run without an update, and a warm-up or a shape that does not fit in the run."""
    if plan.micro_steps_per_epoch == 0:
        raise ValueError(
            f"{_WHERE}: an epoch must have a micro step, got dataset_size={plan.dataset_size} with "
            f"drop_last, which leaves no whole batch of {plan.per_device_train_batch_size} on each "
            f"of {plan.world_size} ranks; use a smaller batch, or keep the last one"
        )
    never = plan.tail == "drop" and plan.updates_per_epoch == 0
    if never or plan.total_updates < 1:
        raise ValueError(
            f"{_WHERE}: a run must have an update, got none from {plan.micro_steps_per_epoch} "
            f"micro steps an epoch in windows of {plan.gradient_accumulation_steps} with "
            f"tail={plan.tail!r}; accumulate less, train longer, or use tail='flush'"
        )
    if plan.warmup_updates > plan.total_updates:
        raise ValueError(
            f"{_WHERE}: warmup_steps must be at most the {plan.total_updates} updates of the run, "
            f"got {plan.warmup_steps}; lower it, or use warmup_ratio"
        )
    _check_shape(plan)


def solve_accumulation(
    global_batch_size: int, per_device_train_batch_size: int, world_size: int
) -> int:
    """Micro steps in a window that make `global_batch_size`, exactly.

    Raises:
        ValueError: there is no such number; the message offers the nearest batch sizes.
    """
    _check_count("global_batch_size", global_batch_size, "it is the samples of an update")
    _check_count("per_device_train_batch_size", per_device_train_batch_size, "1 is the least")
    _check_count("world_size", world_size, "1 is the least")
    micro_step = per_device_train_batch_size * world_size
    steps, left = divmod(global_batch_size, micro_step)
    if left:
        nearest = " and ".join(str(n * micro_step) for n in (steps, steps + 1) if n)
        raise ValueError(
            f"{_WHERE}: global_batch_size must be a multiple of per_device_train_batch_size * "
            f"world_size = {micro_step}, got {global_batch_size}; nearest: {nearest}"
        )
    return steps


def _check_length(plan: TrainPlan) -> None:
    max_steps, epochs = plan.max_steps, plan.num_train_epochs
    if isinstance(max_steps, bool) or not isinstance(max_steps, int):
        raise TypeError(f"{_WHERE}: max_steps must be an integer, got {max_steps!r}")
    if max_steps != -1 and max_steps < 1:
        raise ValueError(
            f"{_WHERE}: max_steps must be -1 or positive, got {max_steps}; -1 counts by epochs"
        )
    if epochs is not None:
        _check_number("num_train_epochs", epochs)
        if not 0 < epochs < math.inf:
            raise ValueError(
                f"{_WHERE}: num_train_epochs must be positive and finite, got {epochs!r}; leave it "
                "out with max_steps"
            )
    if max_steps == -1 and plan.dataset_size is None:
        raise ValueError(
            f"{_WHERE}: max_steps must be positive for a loader without a length "
            "(dataset_size=None), got -1; pass max_steps, or dataset_size"
        )
    if max_steps == -1 and epochs is None:
        raise ValueError(
            f"{_WHERE}: num_train_epochs or max_steps must be given, got neither; pass one of them"
        )


def _check_warmup(plan: TrainPlan) -> None:
    _check_number("warmup_ratio", plan.warmup_ratio)
    if not 0 <= plan.warmup_ratio <= 1:
        raise ValueError(
            f"{_WHERE}: warmup_ratio must be from 0 to 1, got {plan.warmup_ratio!r}; warmup_steps "
            "takes updates"
        )
    steps = plan.warmup_steps
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise TypeError(
            f"{_WHERE}: warmup_steps must be an integer, got {steps!r}; warmup_ratio takes a share"
        )
    if steps < 0:
        raise ValueError(f"{_WHERE}: warmup_steps must be 0 or more, got {steps}; 0 is none")


def _check_shape(plan: TrainPlan) -> None:
    where, kind = f"{_WHERE}: lr_scheduler_kwargs", plan.lr_scheduler_type
    span = plan.total_updates - plan.warmup_updates
    check_shape(where, plan.lr_scheduler_kwargs, span=span)
    for name in plan.lr_scheduler_kwargs:
        if SHAPE_PARAMETERS[name] != kind:
            raise ValueError(
                f"{where}: {name} belongs to {SHAPE_PARAMETERS[name]!r}, got it with {kind!r}; "
                "leave it out"
            )


def _check_count(name: str, value: Any, way_out: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{_WHERE}: {name} must be a positive integer, got {value!r}; {way_out}")
    if value < 1:
        raise ValueError(f"{_WHERE}: {name} must be a positive integer, got {value}; {way_out}")


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{_WHERE}: {name} must be a number, got {value!r}")
