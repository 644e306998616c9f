"""A run as its checkpoint tells it: its plan, its curve, its place in the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .plan import TrainPlan
from .remapped_curve import AnyCurve, RemappedCurve

__all__ = ["UNKNOWN", "Position", "SavedRun", "fingerprint", "position_in"]

UNKNOWN = "unknown"
_WHERE = "LRFence"
_COUNTERS = ("update_step", "epoch", "micro_step_in_epoch", "micro_step_in_window")
# A plan's fields that a fingerprint leaves out.
_LEFT_OUT = {"source"}
_REBUILT = [field.name for field in fields(TrainPlan) if field.name not in _LEFT_OUT]


def fingerprint(plan: TrainPlan | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint says of the plan and the settings that the rates rest on.

    Args:
        plan: the plan as the user wrote it, also after a remap; None without one.
        settings: the wrapper's own: gradient_accumulation_steps, world_size, tail, reduction,
            max_grad_norm, norm_type. Where a plan has the same name, the plan's value stands.

    Returns:
        Plain values by name. With a plan, its fields (enough to rebuild it), and `total_updates`
        and `warmup_updates` as they came out.

    Example:
        >>> fingerprint(None, {"gradient_accumulation_steps": 8, "tail": "flush"})
        {'gradient_accumulation_steps': 8, 'tail': 'flush'}
    """
    found = dict(settings)
    if plan is None:
        return found
    found.update({name: getattr(plan, name) for name in _REBUILT})
    found["lr_scheduler_kwargs"] = dict(plan.lr_scheduler_kwargs)
    found["total_updates"] = plan.total_updates
    found["warmup_updates"] = plan.warmup_updates
    return found


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """What is read from a saved state; None is what it does not say.

    Attributes:
        fingerprint: as `fingerprint` gave it, or empty.
        plan: rebuilt from it.
        curve: the rates the run has used, and would have gone on with.
        update_step: updates done.
        epoch, micro_step_in_epoch, micro_step_in_window: the place in the data.
    """

    fingerprint: Mapping[str, Any]
    plan: TrainPlan | None
    curve: AnyCurve | None
    update_step: int | None
    epoch: int = 0
    micro_step_in_epoch: int = 0
    micro_step_in_window: int = 0

    @classmethod
    def read(cls, saved_state: Mapping[str, Any]) -> SavedRun:
        """Reads what a wrapper's ``state_dict()`` gave.

        Raises:
            TypeError: `saved_state` is no mapping.
            ValueError: its fingerprint or its curve is damaged.
        """
        if not isinstance(saved_state, Mapping):
            raise TypeError(
                f"{_WHERE}: the saved state must be a mapping, got {type(saved_state).__name__}; "
                "pass what ClockedOptimizer.state_dict() gave"
            )
        own = _mapping(saved_state.get("stepclock"))
        found, clock = _mapping(own.get("fingerprint")), _mapping(own.get("clock"))
        plan = _read_plan(found)
        curve: AnyCurve | None = _read_curve(own.get("curve"))
        counters: dict[str, Any] = {name: clock.get(name) for name in _COUNTERS}
        if not all(isinstance(count, int) and count >= 0 for count in counters.values()):
            counters = {"update_step": None}
        if curve is None and plan is not None:
            curve = plan.schedule
        return cls(fingerprint=found, plan=plan, curve=curve, **counters)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _read_plan(found: Mapping[str, Any]) -> TrainPlan | None:
    if not all(name in found for name in _REBUILT):
        return None
    try:
        return TrainPlan(**{name: found[name] for name in _REBUILT})
    except (TypeError, ValueError) as e:
        raise ValueError(f"{_WHERE}: the saved fingerprint is damaged; {e}") from e


def _read_curve(saved: Any) -> RemappedCurve | None:
    if saved is None:
        return None
    try:
        return RemappedCurve(**saved)
    except (TypeError, ValueError) as e:
        raise ValueError(f"{_WHERE}: the saved curve is damaged; {e}") from e


@dataclass(frozen=True, kw_only=True)
class Position:
    """A place in the data, in micro steps of a plan.

    Attributes:
        epoch: epochs ended.
        micro_step_in_epoch: micro steps of this epoch that are done, rounded down: no sample is
            left out.
        micro_step_in_window: those in the open window; its next one may be its last.
        samples_in_epoch: samples of this epoch that were seen, dropped ones included.
        samples_again: of these, what the rounding reads once more.
    """

    epoch: int
    micro_step_in_epoch: int
    micro_step_in_window: int
    samples_in_epoch: int
    samples_again: int


def position_in(plan: TrainPlan, run: SavedRun) -> Position:
    """Where `run` stands, as `plan` counts it. Needs the run's own plan and its clock."""
    assert run.plan is not None and run.update_step is not None
    samples = samples_in_epoch(run.plan, run.micro_step_in_epoch)
    is_over = run.micro_step_in_epoch == run.plan.micro_steps_per_epoch
    per_micro_step = plan.per_device_train_batch_size * plan.world_size
    done = samples // per_micro_step
    if plan.dataset_size is not None and plan.micro_steps_per_epoch is not None:
        is_over = is_over or samples >= plan.dataset_size
        samples = plan.dataset_size if is_over else samples
        done = plan.micro_steps_per_epoch if is_over else min(done, plan.micro_steps_per_epoch)
    # The next micro step closes a window that is full already; a flush needs none for it.
    flushes = plan.tail == "flush" and done == plan.micro_steps_per_epoch
    most = plan.gradient_accumulation_steps - (0 if flushes else 1)
    return Position(
        epoch=run.epoch,
        micro_step_in_epoch=done,
        micro_step_in_window=min(run.micro_step_in_window, most),
        samples_in_epoch=samples,
        samples_again=0 if is_over else samples - done * per_micro_step,
    )


def samples_in_epoch(plan: TrainPlan, micro_step: int) -> int:
    """Samples of an epoch up to its `micro_step`, the dropped ones at its end included."""
    samples = micro_step * plan.per_device_train_batch_size * plan.world_size
    if plan.dataset_size is None or plan.micro_steps_per_epoch is None:
        return samples
    if micro_step >= plan.micro_steps_per_epoch:
        return plan.dataset_size
    return min(samples, plan.dataset_size)
