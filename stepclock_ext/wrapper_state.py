"""What a wrapper saves, loads and copies."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import arguments, companion_state, ops, resume
from .clock import StepClock
from .loss_scale import LossScale
from .update_rules import RULES
from .window import Window

if TYPE_CHECKING:
    from .optimizer import ClockedOptimizer

__all__ = ["load", "pack", "save", "unpack"]

_VERSION = 1
_WHERE = "ClockedOptimizer.load_state_dict"
# Rebuilt from the rest when a wrapper is copied or unpickled.
_DERIVED = ("_pass", "_backend", "_buffers")


def save(opt: ClockedOptimizer) -> dict[str, Any]:
    """The inner states under torch's own keys, everything else under ``stepclock``.

    Several optimizers become one: their groups follow one another and parameters are numbered on.
    """
    opt._settle_late()
    state: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    for inner in opt.optimizers:
        first = sum(len(group["params"]) for group in groups)
        saved = inner.state_dict()
        state.update({first + index: values for index, values in saved["state"].items()})
        for group in saved["param_groups"]:
            groups.append({**group, "params": [first + index for index in group["params"]]})
    return {"state": state, "param_groups": groups, "stepclock": _save_own(opt)}


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
    _check_groups(opt, state)
    _check_states(opt, state)
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
        part = _part(state, groups, first_row)
        inner.load_state_dict(part)
        _keep_dtypes(inner, part)
        first_group += len(groups)
        first_row += rows
    opt.clock.rewind_window()
    opt._start_window()
    opt._build_pass()  # lets go of the state tensors that were replaced
    said = companion_state.apply(opt, None if own is None else own.companions)
    if own is not None:
        resume.go_on(opt, resumption)
        _apply_own(opt, own, keeps_schedulers=resumption.keeps_schedulers)
        resume.apply(opt, resumption, own.last_lr)
    return said


def _keep_dtypes(inner: Optimizer, part: dict[str, Any]) -> None:
    """Gives states their dtype back: torch casts them to their parameter's in loading.

    torch's own optimizers without a fused rule of ours need what it makes of them.
    """
    if type(inner) not in RULES and type(inner).__module__.startswith("torch.optim"):
        return
    params = [p for group in inner.param_groups for p in group["params"]]
    for index, values in part["state"].items():
        state = inner.state[params[index]]
        for key, saved in values.items():
            now = state.get(key)
            if not isinstance(saved, Tensor) or not isinstance(now, Tensor):
                continue
            own = params[index].dtype
            if saved.dtype != now.dtype and now.is_floating_point() and _stands(saved, own):
                state[key] = saved.detach().clone().to(now.device)


def _stands(saved: Tensor, own: torch.dtype) -> bool:
    """Whether a state of that dtype can stand beside a parameter of dtype `own`."""
    up_to_fp32 = (*ops.HALVES, torch.float32)
    return saved.dtype in up_to_fp32 and own in up_to_fp32


def _check_states(opt: ClockedOptimizer, state: dict[str, Any]) -> None:
    """Refuses states that an optimizer would load and stumble over in its next update."""
    indices = [index for group in state["param_groups"] for index in group["params"]]
    owners = [
        (inner, p) for inner in opt.optimizers for g in inner.param_groups for p in g["params"]
    ]
    for index, (inner, p) in zip(indices, owners, strict=True):
        values = state["state"].get(index, {})
        if not isinstance(values, dict):
            raise ValueError(f"{_WHERE}: state {index} must be a dict, got {values!r}")
        for key, value in values.items():
            is_moment = type(inner) in RULES and key != "step" and isinstance(value, Tensor)
            if is_moment and value.shape != p.shape:
                raise ValueError(
                    f"{_WHERE}: {key!r} of state {index} is {tuple(value.shape)}, its parameter "
                    f"{tuple(p.shape)}; load the state of this model"
                )


def _part(state: dict[str, Any], groups: list[dict[str, Any]], first: int) -> dict[str, Any]:
    """One inner optimizer's share of a saved state, numbered from 0 again."""
    indices = [index for group in groups for index in group["params"]]
    values = {index - first: state["state"][index] for index in indices if index in state["state"]}
    renumbered = [{**g, "params": [index - first for index in g["params"]]} for g in groups]
    return {"state": values, "param_groups": renumbered}


def _check_groups(opt: ClockedOptimizer, state: dict[str, Any]) -> None:
    if not {"state", "param_groups"} <= state.keys():
        raise ValueError(
            f"{_WHERE}: the state lacks 'state' and 'param_groups', got {sorted(map(str, state))}; "
            "pass what state_dict() gave"
        )
    saved = [len(group["params"]) for group in state["param_groups"]]
    here = [len(group["params"]) for group in opt.param_groups]
    if saved != here:
        raise ValueError(
            f"{_WHERE}: the state has groups of {saved} parameters, this optimizer of {here}; "
            "build the same groups before loading"
        )


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
            accumulators=_read_accumulators(opt, own["accumulators"]),
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


def _read_accumulators(opt: ClockedOptimizer, saved: dict[int, Tensor]) -> dict[int, Tensor]:
    params, accumulators = opt._pass.rows.params, {}
    for row, grad in saved.items():
        if row not in range(len(params)):
            raise ValueError(
                f"{_WHERE}: the state has an accumulator for parameter {row} of {len(params)}"
            )
        p, here = params[row], opt._pass.rows.sum_dtype(row)
        if grad.shape != p.shape or grad.dtype not in (here, p.dtype):
            raise ValueError(
                f"{_WHERE}: the accumulator of {opt._pass.names[row]!r} is {tuple(grad.shape)} "
                f"{grad.dtype}, here {tuple(p.shape)} {here}; construct the wrapper with the same "
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
    """Attributes for a copy. Accumulators go along: copying a parameter leaves its ``.grad``."""
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
