"""The fence at load: whether a saved state may go on under this wrapper, and with which rates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .distributed import data_parallel_size
from .fence import LRFence, fingerprint, refusal
from .plan_scheduler import PlanScheduler
from .remap import REMAPS, Remapped, remap
from .remapped_curve import RemappedCurve
from .saved_run import SavedRun

if TYPE_CHECKING:
    from .optimizer import ClockedOptimizer

__all__ = ["Resumption", "SchedulerFactory", "apply", "decide", "describe", "go_on"]

SchedulerFactory = Callable[[Optimizer], LRScheduler]
_WHERE = "ClockedOptimizer.load_state_dict"


@dataclass(frozen=True, eq=False)
class Resumption:
    """How a saved run goes on.

    Attributes:
        remapped: the new curve and place in the data; None where the saved one goes on.
        run: what the state says; its curve is a remapped one if it went through a remap before.
        factory: makes the user's scheduler anew.
        holds: every scheduler is let go, and the rates stay as the last update used them.
    """

    remapped: Remapped | None = None
    run: SavedRun | None = None
    factory: SchedulerFactory | None = None
    holds: bool = False

    @property
    def keeps_schedulers(self) -> bool:
        """The saved states of the schedulers are loaded."""
        return self.remapped is None and not self.holds


def describe(opt: ClockedOptimizer) -> dict[str, Any]:
    """What a checkpoint says of the plan: fingerprint, remapped curve, rates of the last update."""
    curve = opt._curve
    return {
        "fingerprint": fingerprint(opt._own_plan, _settings(opt)),
        "curve": None if curve is None else asdict(curve),
        "last_lr": list(opt._last_lr),
    }


def decide(
    opt: ClockedOptimizer,
    state: Mapping[str, Any],
    *,
    how: str | None,
    lr_scaling: str | None,
    factory: SchedulerFactory | None,
) -> Resumption:
    """Compares the saved plan with the wrapper's. Changes nothing.

    Raises:
        ScheduleMismatchError: they differ and `how` is None.
        ValueError: `how` does not exist, or cannot be done with this state.
    """
    if how is not None and how not in (*REMAPS, "as_is"):
        choices = ", ".join((*REMAPS, "as_is"))
        raise ValueError(f"{_WHERE}: remap must be one of {choices}, got {how!r}")
    if how == "as_is" or ("stepclock" not in state and opt._own_plan is None):
        return Resumption()
    report = LRFence(opt._own_plan, settings=_settings(opt)).check(state)
    if how is None:
        if not report.matches:
            raise refusal(report)
        return Resumption(run=report.run)
    if how == "hold" and (opt._own_plan is None or _foreign(opt)):
        return Resumption(holds=True)
    if opt._own_plan is None:
        raise ValueError(
            f"{_WHERE}: remap={how!r} needs a plan, got a wrapper without one; pass plan=, or use "
            "'hold' or 'as_is'"
        )
    if _foreign(opt) and factory is None:
        names = ", ".join(type(scheduler).__name__ for scheduler in _foreign(opt))
        raise ValueError(
            f"{_WHERE}: remap={how!r} must know how to make {names} anew, got no factory; pass "
            "scheduler_factory=lambda opt: ..., or use 'hold' or 'as_is'"
        )
    done = remap(report.run or state, opt._own_plan, how, lr_scaling=lr_scaling)
    return Resumption(remapped=done, run=report.run, factory=factory)


def apply(opt: ClockedOptimizer, resumption: Resumption, last_lr: list[float]) -> None:
    """Gives the loaded wrapper the rates that were decided. Clock and groups are loaded already."""
    done = resumption.remapped
    if resumption.holds:
        opt._schedulers.replace([])
        for group, rate in zip(opt.param_groups, last_lr, strict=False):  # none before an update
            _set_rate(group, rate)
        return
    if done is not None:
        opt.clock.epoch, opt.clock.micro_step_in_epoch = done.epoch, done.micro_step_in_epoch
        _adopt_curve(opt, done.curve)
        for scheduler in opt._schedulers.schedulers:
            if isinstance(scheduler, PlanScheduler):
                scheduler.load_state_dict({"last_epoch": opt.clock.update_step})
        if resumption.factory is not None and _foreign(opt):
            _make_anew(opt, resumption.factory)


def go_on(opt: ClockedOptimizer, resumption: Resumption) -> None:
    """Before saved schedulers are loaded: where the run was remapped before, its curve goes on."""
    curve = None if resumption.run is None else resumption.run.curve
    if resumption.keeps_schedulers and isinstance(curve, RemappedCurve):
        _adopt_curve(opt, curve)


def _settings(opt: ClockedOptimizer) -> dict[str, Any]:
    return {
        "gradient_accumulation_steps": opt.gradient_accumulation_steps,
        "world_size": data_parallel_size(opt._processes),
        "tail": opt.tail,
        "reduction": opt.reduction,
        "max_grad_norm": opt._clip.max_grad_norm,
        "norm_type": opt._clip.norm_type,
    }


def _foreign(opt: ClockedOptimizer) -> list[LRScheduler]:
    """Schedulers that the plan did not make."""
    return [s for s in opt._schedulers.schedulers if not isinstance(s, PlanScheduler)]


def _adopt_curve(opt: ClockedOptimizer, curve: RemappedCurve) -> None:
    """Puts the plan's schedulers on `curve`; ``opt.plan`` counts to its end."""
    assert opt._own_plan is not None
    opt._curve = curve
    if curve.total_updates > 0:
        opt.plan = replace(opt._own_plan, max_steps=curve.total_updates, warmup_ratio=0.0)
    for scheduler in opt._schedulers.schedulers:
        if isinstance(scheduler, PlanScheduler):
            scheduler.curve = curve


def _make_anew(opt: ClockedOptimizer, factory: SchedulerFactory) -> None:
    """The user's scheduler for the new horizon, as if it had followed every update so far."""
    for group in opt.param_groups:
        _set_rate(group, float(group.get("initial_lr", group["lr"])))
    kept = [s for s in opt._schedulers.schedulers if isinstance(s, PlanScheduler)]
    opt._schedulers.replace(kept)
    opt.attach(factory(opt))
    for _ in range(opt.clock.update_step):
        opt._schedulers.step(only=opt._schedulers.schedulers[-1])


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if hasattr(group["lr"], "fill_"):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
