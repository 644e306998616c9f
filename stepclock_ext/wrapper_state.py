"""What a wrapper saves, loads and copies."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from . import arguments, companion_state, ops, resume
from .clock import StepClock
from .inner_states import check_groups, check_states, keep_dtypes, part_of
from .loss_scale import LossScale
from .window import Window

if TYPE_CHECKING:
    from .optimizer import ClockedOptimizer

__all__ = ["load", "options", "pack", "save", "unpack"]

_VERSION = 1
_WHERE = "ClockedOptimizer.load_state_dict"
# Rebuilt from the rest when a wrapper is copied or unpickled.
_DERIVED = ("_pass", "_backend", "_buffers", "_locals")


def save(opt: ClockedOptimizer) -> dict[str, Any]:
    """The inner states under torch's own keys, everything else under ``stepclock``.

    Several optimizers become one: their groups follow one another and parameters are numbered on.
    """
    opt._settle_late()
    if opt._processes is not None:
        opt._processes.refuse_hidden()
    state: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    shards = opt._pass.shards
    shared = None if shards is None else shards.save()
    for i, inner in enumerate(opt.optimizers):
        first = sum(len(group["params"]) for group in groups)
        saved = inner.state_dict()
        states = saved["state"] if shared is None else shared[i]
        state.update({first + index: values for index, values in states.items()})
        for group in saved["param_groups"]:
            groups.append({**group, "params": [first + index for index in group["params"]]})
    return {"state": state, "param_groups": groups, "stepclock": _save_own(opt)}


def options(opt: ClockedOptimizer) -> dict[str, Any]:
    """What a wrapper was constructed with, by the names of its arguments."""
    groups = [
        {key: _plain(value) for key, value in group.items() if key not in _OF_PARAMETERS}
        for group in opt._groups
    ]
    return {
        "optimizer": ([type(inner).__name__ for inner in opt.optimizers], groups),
        "schedulers": [type(scheduler).__name__ for scheduler in opt._schedulers.schedulers],
        "backend": opt._backend.name,
        "gradient_accumulation_steps": opt.gradient_accumulation_steps,
        "max_grad_norm": opt._clip.max_grad_norm,
        "norm_type": opt._clip.norm_type,
        "reduction": opt.reduction,
        "loss_scale": opt.loss_scale,
        "plan": opt.plan,
        "precision": opt._precision,
        "ema": opt._companions.ema,
        "noise_scale": opt._noise is not None,
        "nonfinite": opt.nonfinite,
        "max_consecutive_skips": opt.max_consecutive_skips,
        "tail": opt.tail,
        "process_group": None if opt._processes is None else opt._processes.shared_options,
    }


_OF_PARAMETERS = ("params", "param_names")


def _plain(value: Any) -> Any:
    """An option of a group as it reads on every rank: of an object, its type."""
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, Tensor):
        return value.tolist()
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value)


def _save_own(opt: ClockedOptimizer) -> dict[str, Any]:
    scale = opt.loss_scale
    return {
        "version": _VERSION,
        "clock": opt.clock.state_dict(),
        "window": opt._window.state_dict(),
        "accumulators": {
            row: grad.detach().clone() for row, grad in opt._pass.accumulator.held().items()
        },
        "loss_scale": scale.state_dict() if isinstance(scale, LossScale) else scale,
        "processes": None if opt._processes is None else opt._processes.state_dict(),
        "consecutive_skips": opt._settings.consecutive_skips,
        "schedulers": opt._schedulers.state_dict(),
        **companion_state.save(opt),
        **resume.describe(opt),
    }


def load(
    opt: ClockedOptimizer,
    state: dict[str, Any],
    *,
    remap: str | None,
    lr_scaling: str | None,
    scheduler_factory: resume.SchedulerFactory | None,
) -> list[str]:
    """Takes over a saved state. Everything is read and checked before anything changes.

    Returns:
        What was dropped or made, since the state and the wrapper do not keep the same.
    """
    if not isinstance(state, dict):
        raise TypeError(f"{_WHERE}: the state must be a dict, got {type(state).__name__}")
    check_groups(opt, state)
    check_states(opt, state)
    own = None if "stepclock" not in state else _read_own(opt, state["stepclock"])
    resumption = resume.decide(
        opt, state, how=remap, lr_scaling=lr_scaling, factory=scheduler_factory
    )
    if own is not None and resumption.keeps_schedulers:
        opt._schedulers.check_state(own.schedulers)
    first_group = first_row = 0
    for inner in opt.optimizers:
        groups = state["param_groups"][first_group : first_group + len(inner.param_groups)]
        rows = sum(len(group["params"]) for group in groups)
        part = part_of(state, groups, first_row)
        inner.load_state_dict(part)
        keep_dtypes(inner, part)
        first_group += len(groups)
        first_row += rows
    opt.clock.rewind_window()
    opt._start_window()
    if opt._processes is not None and own is not None:
        opt._processes.load_state_dict(state["stepclock"].get("processes"))
    opt._build_pass()  # lets go of the state tensors that were replaced
    if opt._pass.shards is not None:
        opt._pass.shards.load()
    if opt._locals is not None:
        opt._locals.spread_states()
    said = companion_state.apply(opt, None if own is None else own.companions)
    if own is not None:
        resume.go_on(opt, resumption)
        _apply_own(opt, own, keeps_schedulers=resumption.keeps_schedulers)
        resume.apply(opt, resumption, own.last_lr)
    return said


@dataclass(frozen=True, eq=False)
class _Own:
    """The wrapper's part of a saved state, read and found good."""

    clock: StepClock
    window: Window
    accumulators: dict[int, Tensor]
    loss_scale: LossScale | float | None
    consecutive_skips: int
    schedulers: list[dict[str, Any]]
    last_lr: list[float]
    companions: companion_state.SavedCompanions


def _read_own(opt: ClockedOptimizer, own: Any) -> _Own:
    """Reads what `_save_own` wrote; raises ValueError where it is damaged or of another wrapper."""
    if not isinstance(own, dict) or own.get("version") != _VERSION:
        version = own.get("version") if isinstance(own, dict) else own
        raise ValueError(
            f"{_WHERE}: the state has version {version!r}, this release reads {_VERSION}"
        )
    clock = StepClock(updates_per_epoch=opt.clock.updates_per_epoch)
    try:
        clock.load_state_dict(own["clock"])
        return _Own(
            clock=clock,
            window=Window.from_state_dict(own["window"]),
            accumulators=_read_accumulators(opt, own),
            loss_scale=_read_loss_scale(opt, own["loss_scale"]),
            consecutive_skips=operator.index(own["consecutive_skips"]),
            schedulers=[
                {"state": dict(saved["state"]), "ended": bool(saved["ended"])}
                for saved in own["schedulers"]
            ],
            last_lr=[float(rate) for rate in own["last_lr"]],
            companions=companion_state.read(opt, own),
        )
    except (KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"{_WHERE}: the state is damaged, {type(e).__name__}: {e}") from e


def _read_loss_scale(opt: ClockedOptimizer, saved: Any) -> LossScale | float | None:
    here = opt.loss_scale
    same_kind = isinstance(saved, dict) == isinstance(here, LossScale)
    if not same_kind or (saved is None) != (here is None):
        raise ValueError(
            f"{_WHERE}: the state has loss_scale={saved!r}, this wrapper {here!r}; construct it "
            "with the same kind of loss scale"
        )
    return LossScale(**saved) if isinstance(saved, dict) else saved


def _read_accumulators(opt: ClockedOptimizer, own: dict[str, Any]) -> dict[int, Tensor]:
    saved, params, accumulators = own["accumulators"], opt._pass.rows.params, {}
    here = None if opt._processes is None else opt._processes.place
    place = (own.get("processes") or {}).get("place")
    if saved and place != here:
        raise ValueError(
            f"{_WHERE}: the state must hold the open window of this process, rank and world size "
            f"{here}, got that of {place}; save after an update, or every rank its own"
        )
    for row, grad in saved.items():
        if row not in range(len(params)):
            raise ValueError(
                f"{_WHERE}: the state has an accumulator for parameter {row} of {len(params)}"
            )
        p, dtype = params[row], opt._pass.rows.sum_dtype(row)
        if grad.shape != p.shape or grad.dtype not in (dtype, p.dtype):
            raise ValueError(
                f"{_WHERE}: the accumulator of {opt._pass.names[row]!r} is {tuple(grad.shape)} "
                f"{grad.dtype}, here {tuple(p.shape)} {dtype}; construct the wrapper with the same "
                "accumulate_dtype and gradient_accumulation_steps"
            )
        accumulators[row] = grad.detach().clone().to(p.device)
    return accumulators


def _apply_own(opt: ClockedOptimizer, own: _Own, *, keeps_schedulers: bool) -> None:
    opt.clock.load_state_dict(own.clock.state_dict())
    opt._settings.loss_scale = own.loss_scale
    opt._settings.consecutive_skips = own.consecutive_skips
    opt._last_lr = tuple(own.last_lr)
    if keeps_schedulers:
        opt._schedulers.load_state_dict(own.schedulers)
    accumulator = opt._pass.accumulator
    accumulator.restore(own.accumulators)
    if accumulator.norms is not None and own.clock.micro_step_in_window:
        accumulator.norms.load_state_dict(own.companions.micro_norms)
    opt._window = own.window
    opt._expect_micro_step()


def pack(opt: ClockedOptimizer) -> dict[str, Any]:
    """Attributes for a copy. Accumulators go along: copying a parameter leaves its ``.grad``.

    Raises:
        RuntimeError: it holds a share of the states, or tells an engine when to reduce.
    """
    if opt._processes is not None:
        opt._processes.refuse_copy()
    opt._settle_late()
    opt._companions.follow_all(opt._pass.rows)  # a copy's parameters count their versions anew
    state = {name: value for name, value in vars(opt).items() if name not in _DERIVED}
    accumulator = opt._pass.accumulator
    state["held"], norms = accumulator.held(), accumulator.norms
    state["micro_norms"] = None if norms is None else norms.state_dict(accumulator.grads())
    return state


def unpack(opt: ClockedOptimizer, state: dict[str, Any]) -> None:
    """Makes `opt` the wrapper that `pack` described."""
    held, micro_norms = state.pop("held"), state.pop("micro_norms")
    opt.__dict__.update(state)
    opt._buffers = {}
    opt._backend = ops.make_backend(opt._backend_name, arguments.first_device(opt.optimizers))
    opt._build_pass()
    opt._companions.settle_all()
    accumulator = opt._pass.accumulator
    if held:
        accumulator.restore(held)
    if accumulator.norms is not None:
        accumulator.norms.load_state_dict(micro_norms)
