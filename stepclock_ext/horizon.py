"""How many updates a torch scheduler is planned for, where it says so."""

from __future__ import annotations

from functools import partial

from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
)

from .plan_scheduler import PlanScheduler

__all__ = ["declared_horizon"]


def declared_horizon(scheduler: LRScheduler) -> int | None:
    """The updates that `scheduler` was built for; None where it declares none.

    A plan's scheduler, one-cycle (``total_steps``), cosine (``T_max``), polynomial
    (``total_iters``), and transformers' LambdaLR (``num_training_steps``) declare one. A sequence
    declares its last milestone and what follows it, a chain the longest horizon of its parts.
    LinearLR declares none: it is a warm-up more often than a run.

    Example:
        >>> import torch
        >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        >>> declared_horizon(CosineAnnealingLR(sgd, T_max=400))
        400
    """
    if isinstance(scheduler, PlanScheduler):
        return scheduler.total_updates
    if isinstance(scheduler, OneCycleLR):
        return int(scheduler.total_steps)
    if isinstance(scheduler, CosineAnnealingLR):
        return int(scheduler.T_max)
    if isinstance(scheduler, PolynomialLR):
        return int(scheduler.total_iters)
    if isinstance(scheduler, LambdaLR):
        return _of_lambdas(scheduler)
    if isinstance(scheduler, SequentialLR):
        last = declared_horizon(scheduler._schedulers[-1])
        return None if last is None else scheduler._milestones[-1] + last
    if isinstance(scheduler, ChainedScheduler):
        horizons = [declared_horizon(part) for part in scheduler._schedulers]
        return max((horizon for horizon in horizons if horizon is not None), default=None)
    return None


def _of_lambdas(scheduler: LambdaLR) -> int | None:
    for function in scheduler.lr_lambdas:
        if isinstance(function, partial) and "num_training_steps" in function.keywords:
            return int(function.keywords["num_training_steps"])
    return None
