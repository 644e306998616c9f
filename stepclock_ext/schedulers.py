"""The schedulers that follow a wrapper's clock: one step per update, none on a skip."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import partial, update_wrapper
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from .plan import TrainPlan
from .plan_binding import check_horizon
from .plan_scheduler import PlanScheduler

__all__ = ["AttachedSchedulers"]

# What torch's schedulers take out of a state that they load.
_NEEDED = frozenset(("lr_lambdas", "_schedulers"))


class AttachedSchedulers:
    """Torch schedulers, moved by updates; metric schedulers only by a metric."""

    def __init__(self) -> None:
        self.schedulers: list[LRScheduler] = []
        self._ended: set[int] = set()  # one-cycles whose last value has been used

    def attach(
        self,
        scheduler: LRScheduler,
        *,
        owners: Sequence[Optimizer],
        plan: TrainPlan | None = None,
    ) -> None:
        """Adds a scheduler, built on one of `owners`.

        Raises:
            TypeError: it is no torch scheduler.
            ValueError: it was built on another optimizer, for another horizon than the plan's, or
                is attached already.
        """
        if not isinstance(scheduler, LRScheduler):
            raise TypeError(
                f"ClockedOptimizer: a scheduler must be a torch LRScheduler, got {scheduler!r}"
            )
        if not any(scheduler.optimizer is owner for owner in owners):
            raise ValueError(
                f"ClockedOptimizer: {type(scheduler).__name__} was built on another optimizer; "
                "build it on this wrapper or on the optimizer inside"
            )
        if any(scheduler is other for other in self.schedulers):
            raise ValueError(f"ClockedOptimizer: {type(scheduler).__name__} is attached already")
        check_horizon(plan, scheduler)
        self.schedulers.append(scheduler)

    def refuse_ended(self) -> None:
        """Called before an update.

        Raises:
            RuntimeError: a one-cycle schedule has no rate for one more update.
        """
        if self._ended:
            total = self.schedulers[min(self._ended)].total_steps  # type: ignore[attr-defined]
            raise RuntimeError(
                f"ClockedOptimizer: OneCycleLR is planned for {total} updates and all are done; "
                "build it with a larger total_steps, or stop training here"
            )

    def replace(self, schedulers: Sequence[LRScheduler]) -> None:
        """Lets go of all schedulers but these."""
        ended = [self.schedulers[index] for index in self._ended]
        self.schedulers = list(schedulers)
        self._ended = {
            index
            for index, scheduler in enumerate(self.schedulers)
            if any(scheduler is other for other in ended)
        }

    def step(self, only: LRScheduler | None = None) -> None:
        """One update has happened; `only` moves one scheduler, which has to catch up."""
        for index, scheduler in enumerate(self.schedulers):
            if isinstance(scheduler, ReduceLROnPlateau) or only not in (None, scheduler):
                continue
            if isinstance(scheduler, OneCycleLR) and scheduler.last_epoch + 1 >= int(
                scheduler.total_steps
            ):
                self._ended.add(index)
                continue
            _mark_stepped(scheduler.optimizer)
            scheduler.step()

    def report_metric(self, value: float) -> None:
        """Moves the metric schedulers, and nothing else."""
        for scheduler in self.schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(value)

    def extend_to_group(self, group: dict[str, Any]) -> None:
        """Makes room for a group that was just added, at its own base rate.

        Only for schedules that are a function of the base rate (`refuse_group` let them pass).
        """
        for scheduler in self.schedulers:
            groups = scheduler.optimizer.param_groups
            index = next((i for i, other in enumerate(groups) if other is group), None)
            if index is None:
                continue  # another of several optimizers is its own
            base = group.setdefault("initial_lr", group["lr"])
            scheduler.base_lrs.insert(index, base)
            if isinstance(scheduler, LambdaLR):
                factor = scheduler.lr_lambdas[index - 1]
                scheduler.lr_lambdas.insert(index, factor)
                group["lr"] = base * factor(scheduler.last_epoch)
            elif isinstance(scheduler, PlanScheduler):
                group["lr"] = scheduler.get_lr()[index]
            scheduler._last_lr = [other["lr"] for other in groups]

    def refuse_group(self, inner: Optimizer, others: Sequence[Optimizer]) -> None:
        """Called before a group is added to `inner`; `others` are the other inner optimizers.

        Raises:
            RuntimeError: an attached scheduler keeps per-group values that nothing can extend.
        """
        for scheduler in self.schedulers:
            if any(scheduler.optimizer is other for other in others):
                continue
            if not isinstance(scheduler, (LambdaLR, PlanScheduler)):
                raise RuntimeError(
                    f"ClockedOptimizer.add_param_group: {type(scheduler).__name__} cannot take a "
                    "group after it was built; add the group first, or use LambdaLR"
                )

    def state_dict(self) -> list[dict[str, Any]]:
        """Each scheduler's own state."""
        return [
            {"state": deepcopy(scheduler.state_dict()), "ended": index in self._ended}
            for index, scheduler in enumerate(self.schedulers)
        ]

    def check_state(self, states: Sequence[dict[str, Any]]) -> None:
        """Refuses saved states that are not of these schedulers.

        Raises:
            ValueError: there are more or fewer of them, or they are of another kind.
        """
        if len(states) != len(self.schedulers):
            raise ValueError(
                f"ClockedOptimizer.load_state_dict: the state holds {len(states)} schedulers, this "
                f"wrapper {len(self.schedulers)}; attach the same ones before loading"
            )
        for scheduler, saved in zip(self.schedulers, states, strict=True):
            lacking = _NEEDED.intersection(scheduler.state_dict()) - saved["state"].keys()
            if lacking:
                raise ValueError(
                    "ClockedOptimizer.load_state_dict: the state's scheduler must be a "
                    f"{type(scheduler).__name__}, got one without {sorted(lacking)}; attach the "
                    "same ones before loading"
                )

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Takes over what `state_dict` gave."""
        for scheduler, saved in zip(self.schedulers, states, strict=True):
            scheduler.load_state_dict(deepcopy(saved["state"]))
        self._ended = {index for index, saved in enumerate(states) if saved["ended"]}


def _mark_stepped(optimizer: Optimizer) -> None:
    """Tells torch's schedulers that an update has happened, so that they do not warn.

    They look for the marks that building them leaves on an optimizer; a copied optimizer has lost
    the one on ``step``.
    """
    marked: Any = optimizer
    marked._opt_called = True
    if not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        step = update_wrapper(partial(optimizer.step), type(optimizer).step)
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        marked.step = step
