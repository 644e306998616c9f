"""What a wrapper takes from its plan, and what it refuses because of it."""

from __future__ import annotations

from fractions import Fraction

from torch.optim.lr_scheduler import LRScheduler

from .horizon import declared_horizon
from .plan import TrainPlan

__all__ = ["check_horizon", "follow_plan", "window_updates_per_epoch"]

_WHERE = "ClockedOptimizer"


def follow_plan(plan: TrainPlan | None, steps: int, tail: str) -> tuple[int, str]:
    """Window length and tail policy: the plan's where the arguments were left at their defaults.

    Raises:
        TypeError: `plan` is no plan.
        ValueError: an argument says something else than the plan.
    """
    if plan is None:
        return steps, tail
    if not isinstance(plan, TrainPlan):
        raise TypeError(f"{_WHERE}: plan must be a TrainPlan, got {type(plan).__name__}")
    for name, value, default, planned in (
        ("gradient_accumulation_steps", steps, 1, plan.gradient_accumulation_steps),
        ("tail", tail, "flush", plan.tail),
    ):
        if value not in (default, planned):
            raise ValueError(
                f"{_WHERE}: {name} must be the plan's {planned!r}, got {value!r}; leave it out, or "
                "plan with it"
            )
    return plan.gradient_accumulation_steps, plan.tail


def check_horizon(plan: TrainPlan | None, scheduler: LRScheduler) -> None:
    """Refuses a scheduler that was built for another number of updates than the plan's.

    Raises:
        ValueError: its horizon is another one; the message names both.
    """
    horizon = None if plan is None else declared_horizon(scheduler)
    if plan is not None and horizon not in (None, plan.total_updates):
        raise ValueError(
            f"{_WHERE}: {type(scheduler).__name__} must be built for the plan's "
            f"{plan.total_updates} updates, got {horizon}; count it in updates (micro steps / "
            f"{plan.gradient_accumulation_steps}), or leave it out: the plan makes its own"
        )


def window_updates_per_epoch(plan: TrainPlan | None) -> int | Fraction | None:
    """Updates of an epoch for the clock; a fraction where tails are carried over epochs."""
    if plan is None or plan.micro_steps_per_epoch is None:
        return None
    if plan.tail == "carry":
        return Fraction(plan.micro_steps_per_epoch, plan.gradient_accumulation_steps)
    return plan.updates_per_epoch
