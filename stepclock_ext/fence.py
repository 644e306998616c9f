"""The LR Fence: is the plan in the checkpoint the plan now, and what if it is not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import ScheduleMismatchError
from .fence_report import FenceReport
from .plan import TrainPlan
from .plan_scheduler import Curve
from .remap import Remapped, remaining_in, remap
from .saved_run import UNKNOWN, SavedRun, fingerprint

__all__ = ["FenceReport", "LRFence", "fingerprint", "refusal"]

_RATES = 200  # before and after, in a report
# Said by total_updates and warmup_updates; kept so that the plan can be rebuilt.
_NOT_COMPARED = {"num_train_epochs", "max_steps", "warmup_ratio", "warmup_steps"}


class LRFence:
    """Compares a saved run with the plan now, and says what would become of the learning rate.

    Args:
        plan: the plan now; None compares the settings alone.
        settings: the wrapper's own, as for `fingerprint`; without them the plan alone is compared.

    Example:
        >>> def plan(steps):
        ...     return TrainPlan(
        ...         dataset_size=8000, per_device_train_batch_size=1, num_train_epochs=1,
        ...         gradient_accumulation_steps=steps, learning_rate=1.0,
        ...     )
        >>> clock = {"update_step": 500, "epoch": 0, "micro_step_in_epoch": 4000}
        >>> clock["micro_step_in_window"] = 0
        >>> state = {"stepclock": {"fingerprint": fingerprint(plan(8), {}), "clock": clock}}
        >>> report = LRFence(plan(1)).check(state)
        >>> report.matches, report.differences["gradient_accumulation_steps"]
        (False, (8, 1))
        >>> report.remaining_updates, report.total_updates
        (4000, 4500)
        >>> round(report.lr_before[-1], 2), round(report.lr_after[0], 2)
        (0.5, 0.99)
        >>> report = LRFence(plan(1)).check(state, remap="by_samples")
        >>> round(report.lr_after[0], 2), report.landing
        (0.5, (4500, 0.0))
    """

    def __init__(
        self, plan: TrainPlan | None, *, settings: Mapping[str, Any] | None = None
    ) -> None:
        if plan is not None and not isinstance(plan, TrainPlan):
            raise TypeError(f"LRFence: plan must be a TrainPlan or None, got {plan!r}")
        self.plan = plan
        self.fingerprint = fingerprint(plan, settings or {})

    def check(
        self,
        saved_state: Mapping[str, Any],
        *,
        remap: str | None = None,
        lr_scaling: str | None = None,
    ) -> FenceReport:
        """What differs between a wrapper's saved state and now.

        Args:
            saved_state: what ``state_dict()`` gave; nothing in it changes.
            remap: shows the rates of this remap; see `remap.remap`.
            lr_scaling: as for it.

        Raises:
            TypeError: `saved_state` is no mapping.
            ValueError: it is damaged, or the remap cannot be made.
        """
        run = SavedRun.read(saved_state)
        differences = self._differences(run)
        if remap is not None:
            return self._remapped(run, differences, remap, lr_scaling)
        curve: Curve | None = None if self.plan is None else self.plan.schedule
        if not differences and run.curve is not None:
            curve = run.curve
        return self._report(run, differences, curve)

    def _differences(self, run: SavedRun) -> dict[str, tuple[Any, Any]]:
        found = {}
        for name, now in self.fingerprint.items():
            saved = run.fingerprint.get(name, UNKNOWN)
            if name not in _NOT_COMPARED and saved != now:
                found[name] = (saved, now)
        return found

    def _remapped(
        self,
        run: SavedRun,
        differences: Mapping[str, tuple[Any, Any]],
        how: str,
        lr_scaling: str | None,
    ) -> FenceReport:
        if self.plan is None:
            raise ValueError(f"LRFence: remap needs a plan, got {how!r} with plan=None; pass plan=")
        done = remap(run, self.plan, how, lr_scaling=lr_scaling)
        return self._report(run, differences, done.curve, done)

    def _report(
        self,
        run: SavedRun,
        differences: Mapping[str, tuple[Any, Any]],
        curve: Curve | None,
        done: Remapped | None = None,
    ) -> FenceReport:
        update, total, remaining = run.update_step, None, None
        if self.plan is not None and update is not None:
            remaining = remaining_in(self.plan, run)
            total = update + remaining
        return FenceReport(
            differences=dict(differences),
            update_step=update,
            remaining_updates=remaining,
            total_updates=total,
            warmup_interval=_warmup(self.plan, curve),
            landing=_landing(self.plan, curve, total, is_raw=done is None and bool(differences)),
            lr_before=_rates(run.curve, 0 if update is None else max(0, update - _RATES), update),
            lr_after=_rates(curve, update, _last(curve, update)),
            remap=None if done is None else done.curve.how,
            factor=1.0 if done is None else done.factor,
            notes=() if done is None else done.notes,
            run=run,
            curve=curve,
        )


def refusal(report: FenceReport) -> ScheduleMismatchError:
    """The error that says that a run cannot go on under another plan."""
    names = ", ".join(report.differences)
    return ScheduleMismatchError(
        f"LRFence: the plan must be the saved one, got other values of {names}; pass "
        "remap='by_samples', 'by_progress', 'keep_lr', 'hold' or 'as_is'\n" + report.table(),
        report,
    )


def _warmup(plan: TrainPlan | None, curve: Curve | None) -> tuple[int, int] | None:
    updates = 0 if plan is None else plan.warmup_updates
    updates = getattr(curve, "warmup_updates", updates)
    return (1, updates) if updates else None


def _landing(
    plan: TrainPlan | None, curve: Curve | None, total: int | None, *, is_raw: bool
) -> tuple[int, float] | None:
    """The last update and its rate; where the plan is only compared, of a curve that would land."""
    if plan is None or curve is None or total is None:
        return None
    if is_raw:
        return total, plan.lr_at(plan.total_updates)
    return curve.total_updates, curve.lr_at(max(1, curve.total_updates))


def _last(curve: Curve | None, update: int | None) -> int | None:
    if curve is None or update is None:
        return None
    return max(update + 1, min(update + _RATES, curve.total_updates))


def _rates(curve: Curve | None, first: int | None, last: int | None) -> tuple[float, ...]:
    """The rates after update `first`, up to and with `last`."""
    if curve is None or first is None or last is None:
        return ()
    return tuple(curve.lr_at(update) for update in range(first + 1, last + 1))
