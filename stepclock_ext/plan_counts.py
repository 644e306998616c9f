"""How many micro steps and updates a plan makes."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, floor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .plan import TrainPlan

__all__ = [
    "micro_steps_per_epoch",
    "num_epochs",
    "remaining_updates",
    "total_updates",
    "updates_per_epoch",
    "warmup_updates",
]


def micro_steps_per_epoch(plan: TrainPlan) -> int | None:
    """Micro steps of one rank; None without a length."""
    if plan.dataset_size is None:
        return None
    samples = _divide(plan.dataset_size, plan.world_size, down=plan.sampler_drop_last)
    return _divide(samples, plan.per_device_train_batch_size, down=plan.dataloader_drop_last)


def updates_per_epoch(plan: TrainPlan) -> int | None:
    """Windows of an epoch that starts with none open; None without a length."""
    if plan.micro_steps_per_epoch is None:
        return None
    down = plan.tail != "flush"
    return _divide(plan.micro_steps_per_epoch, plan.gradient_accumulation_steps, down=down)


def total_updates(plan: TrainPlan) -> int:
    """Updates of the run, by `max_steps` or by epochs."""
    if plan.max_steps > 0:
        return plan.max_steps
    micro_steps, updates = _epoch(plan)
    if plan.tail == "carry":
        return floor(_epochs(plan) * micro_steps / plan.gradient_accumulation_steps)
    return ceil(_epochs(plan) * updates)


def num_epochs(plan: TrainPlan) -> int | None:
    """Epochs that are begun; None without a length."""
    if plan.dataset_size is None:
        return None
    if plan.max_steps < 0:
        return ceil(_epochs(plan))
    micro_steps, updates = _epoch(plan)
    if plan.tail == "carry":
        return _divide(plan.max_steps * plan.gradient_accumulation_steps, micro_steps)
    return _divide(plan.max_steps, updates)


def warmup_updates(plan: TrainPlan) -> int:
    """Updates of warm-up: the steps, or else the ceiling of ratio * total."""
    if plan.lr_scheduler_type == "constant":
        return 0
    return plan.warmup_steps or ceil(_exact(plan.warmup_ratio) * plan.total_updates)


def remaining_updates(
    plan: TrainPlan, *, epoch: int, micro_step_in_epoch: int, micro_step_in_window: int
) -> int:
    """Updates that the data left at a position gives; negative past the end."""
    micro_steps, updates = _epoch(plan)
    size = plan.gradient_accumulation_steps
    rest = micro_steps - micro_step_in_epoch + micro_step_in_window
    if plan.tail == "carry":
        return floor((rest + (_epochs(plan) - epoch - 1) * micro_steps) / size)
    this_epoch = _divide(rest, size, down=plan.tail == "drop")
    return plan.total_updates - (epoch + 1) * updates + this_epoch


def _epoch(plan: TrainPlan) -> tuple[int, int]:
    """Micro steps and updates of an epoch, of a plan that knows its length."""
    assert plan.micro_steps_per_epoch is not None and plan.updates_per_epoch is not None
    return plan.micro_steps_per_epoch, plan.updates_per_epoch


def _epochs(plan: TrainPlan) -> Fraction:
    assert plan.num_train_epochs is not None
    return _exact(plan.num_train_epochs)


def _exact(number: float) -> Fraction:
    return Fraction(str(number))  # the decimal that was written: 0.07 is seven hundredths


def _divide(number: int, divisor: int, *, down: bool = False) -> int:
    return number // divisor if down else -(-number // divisor)
