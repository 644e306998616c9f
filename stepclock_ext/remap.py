"""A changed plan in the middle of a run: the learning rate goes on from where it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .plan import TrainPlan
from .remap_proof import prove
from .remapped_curve import REMAPS, AnyCurve, RemappedCurve
from .samples_seen import sample_map
from .saved_run import Position, SavedRun, position_in
from .schedules import Schedule, scale_learning_rate

__all__ = ["REMAPS", "Remapped", "RemappedCurve", "remap"]

_WHERE = "remap"
_TIMESCALE = 10_000  # of inverse_sqrt, as in `Schedule`


@dataclass(frozen=True, kw_only=True)
class Remapped:
    """What a remap came to.

    Attributes:
        curve: the rates, for a `PlanScheduler`.
        total_updates: the new last update.
        remaining_updates: of these, what is left.
        factor: by which the rest of the curve was multiplied.
        epoch, micro_step_in_epoch: the place in the data, in micro steps of the new plan.
        notes: what the user should know.
    """

    curve: RemappedCurve
    total_updates: int
    remaining_updates: int
    factor: float
    epoch: int
    micro_step_in_epoch: int
    notes: tuple[str, ...]


def remap(
    saved: SavedRun | Mapping[str, Any],
    plan: TrainPlan,
    how: str,
    *,
    lr_scaling: str | None = None,
) -> Remapped:
    """Moves the rest of a saved run's learning rate onto `plan`.

    u0 updates are done and R are left under `plan`, from the place in the data; the new total is
    u0 + R. See `RemappedCurve` for the rates. What is promised is proved before it is returned: the
    rest begins at the current rate (times the factor), the first update uses the rate that the
    remap promises, and the last one lands.

    Args:
        saved: a wrapper's ``state_dict()``, or the `run` of a `FenceReport`.
        plan: the plan now.
        how: "by_samples" keeps the rate as a function of samples seen; "by_progress" stretches the
            rest of the old curve; "keep_lr" falls from the current rate in the plan's own shape;
            "hold" stays at it.
        lr_scaling: "linear" or "sqrt" multiplies the rest by that rule of the effective batch; a
            `learning_rate` of `plan` that differs from the saved one does by their ratio.

    Raises:
        ValueError: `how` or `lr_scaling` does not exist; both `lr_scaling` and another
            `learning_rate` are given; "by_samples" with another number of samples in all; or the
            state does not say what is needed.

    Example:
        >>> from .fence import fingerprint
        >>> old, new = (
        ...     TrainPlan(
        ...         dataset_size=800, per_device_train_batch_size=10, world_size=world_size,
        ...         num_train_epochs=2, learning_rate=0.02, lr_scheduler_type="linear",
        ...     )
        ...     for world_size in (2, 4)
        ... )
        >>> clock = {"update_step": 40, "epoch": 1, "micro_step_in_epoch": 0}
        >>> clock["micro_step_in_window"] = 0
        >>> state = {"stepclock": {"fingerprint": fingerprint(old, {}), "clock": clock}}
        >>> after = remap(state, new, "by_progress", lr_scaling="linear")
        >>> after.total_updates, old.lr_at(40), after.curve.lr_at(60), after.notes
        (60, 0.01, 0.0, ('the rest of the curve is multiplied by 2',))
    """
    if how not in REMAPS:
        raise ValueError(f"{_WHERE}: how must be one of {', '.join(REMAPS)}, got {how!r}")
    run = saved if isinstance(saved, SavedRun) else SavedRun.read(saved)
    if run.plan is None or run.curve is None or run.update_step is None:
        lacks = "clock" if run.plan is not None else "plan"
        raise ValueError(
            f"{_WHERE}: the state must hold the plan and the clock it was saved with, got one "
            f"without a {lacks}; use 'as_is' and answer for the rates"
        )
    position = position_in(plan, run)
    remaining = remaining_in(plan, run)
    factor = _factor(run.plan, plan, lr_scaling)
    curve = RemappedCurve(
        how,
        before=run.curve,
        start=run.update_step,
        remaining=remaining,
        learning_rate=float(plan.learning_rate),
        min_lr=float(plan.min_lr),
        factor=factor,
        samples=sample_map(run, plan, position, remaining) if how == "by_samples" else None,
        shape=_shape(run.plan, plan, remaining) if how == "keep_lr" else None,
    )
    prove(curve)
    return Remapped(
        curve=curve,
        total_updates=curve.total_updates,
        remaining_updates=remaining,
        factor=factor,
        epoch=position.epoch,
        micro_step_in_epoch=position.micro_step_in_epoch,
        notes=tuple(_notes(curve, run.plan, plan, position)),
    )


def remaining_in(plan: TrainPlan, run: SavedRun) -> int:
    """Updates that `plan` has left where `run` stands; needs the run's clock.

    Without the run's own plan its place in the data is not known, and its updates are what counts.
    """
    assert run.update_step is not None
    if run.plan is None:
        return plan.remaining_updates(run.update_step)
    epochs = plan.num_train_epochs
    if plan.max_steps < 0 and epochs is not None and run.epoch >= epochs:
        return 0  # the data is over, whatever window was carried past its end
    position = position_in(plan, run)
    return plan.remaining_updates(
        run.update_step,
        epoch=position.epoch,
        micro_step_in_epoch=position.micro_step_in_epoch,
        micro_step_in_window=position.micro_step_in_window,
    )


def _factor(old: TrainPlan, new: TrainPlan, lr_scaling: str | None) -> float:
    if lr_scaling not in (None, "none", "linear", "sqrt"):
        raise ValueError(
            f"{_WHERE}: lr_scaling must be 'linear', 'sqrt' or None, got {lr_scaling!r}"
        )
    if lr_scaling in (None, "none"):
        same = old.learning_rate == new.learning_rate
        return 1.0 if same else new.learning_rate / old.learning_rate
    if old.learning_rate != new.learning_rate:
        raise ValueError(
            f"{_WHERE}: lr_scaling must be None where learning_rate is changed as well (from "
            f"{old.learning_rate} to {new.learning_rate}), got {lr_scaling!r}; the rest would be "
            "scaled twice, give one of them"
        )
    sizes = {"old_batch_size": old.effective_batch_size, "new_batch_size": new.effective_batch_size}
    return scale_learning_rate(1.0, rule=lr_scaling, **sizes)


def _shape(old: TrainPlan, new: TrainPlan, remaining: int) -> Schedule:
    """The plan's own decay, over the updates that are left, from 1 to 0."""
    kind, shape = new.lr_scheduler_type, dict(new.lr_scheduler_kwargs)
    span = max(1, remaining)
    if kind == "inverse_sqrt":
        shape["timescale"] = new.schedule.timescale or new.warmup_updates or _TIMESCALE
    if shape.get("num_decay_steps") is not None:
        shape["num_decay_steps"] = min(span, shape["num_decay_steps"])
    return Schedule(kind, learning_rate=1.0, total_updates=span, **shape)


def _notes(
    curve: RemappedCurve, old: TrainPlan, new: TrainPlan, position: Position
) -> Iterator[str]:
    if curve.factor != 1.0:
        yield f"the rest of the curve is multiplied by {curve.factor:g}"
    if curve.remaining == 0:
        yield f"nothing remains: all {curve.start} updates of the plan are done"
    if curve.how == "hold":
        yield "'hold' does not land: the rate stays at the current one"
    elif not curve.lands:
        yield f"the curve does not land: {_kind(curve)!r} has no landing"
    if curve.how[:2] == "by" and new.lr_scheduler_type != old.lr_scheduler_type:
        yield (
            f"{curve.how!r} keeps the old curve ({old.lr_scheduler_type!r}); 'keep_lr' takes the "
            f"shape of {new.lr_scheduler_type!r}"
        )
    if position.samples_again:
        yield (
            "the place in the data is inside a micro step of the new plan: "
            f"{position.samples_again} samples are read again"
        )


def _kind(curve: AnyCurve) -> str:
    if isinstance(curve, Schedule):
        return curve.kind
    return curve.how if curve.how == "hold" else _kind(curve.shape or curve.before)
