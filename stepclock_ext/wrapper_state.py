"""What a wrapper saves, loads and copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from . import ops
from .loss_scale import LossScale
from .window import Window

if TYPE_CHECKING:
    from .optimizer import ClockedOptimizer

__all__ = ["load", "pack", "save", "unpack"]

_VERSION = 1
# Rebuilt from the rest when a wrapper is copied or unpickled.
_DERIVED = ("_pass",)


def save(opt: ClockedOptimizer) -> dict[str, Any]:
    """The inner states under torch's own keys, everything else under ``stepclock``.

    Several optimizers become one: their groups follow one another and parameters are numbered on.
    """
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
    scale = opt._loss_scale
    return {
        "version": _VERSION,
        "clock": opt.clock.state_dict(),
        "window": opt._window.state_dict(),
        "accumulators": {
            row: grad.detach().clone() for row, grad in opt._pass.accumulator.held().items()
        },
        "loss_scale": scale.state_dict() if isinstance(scale, LossScale) else scale,
        "consecutive_skips": opt._consecutive_skips,
        "schedulers": opt._schedulers.state_dict(),
    }


def load(opt: ClockedOptimizer, state: dict[str, Any]) -> None:
    """Takes over a saved state. Everything is checked before anything changes."""
    own = state.get("stepclock")
    _check_groups(opt, state)
    if own is not None:
        _check_own(opt, own)
    first_group = first_row = 0
    for inner in opt.optimizers:
        groups = state["param_groups"][first_group : first_group + len(inner.param_groups)]
        rows = sum(len(group["params"]) for group in groups)
        inner.load_state_dict(_part(state, groups, first_row))
        first_group += len(groups)
        first_row += rows
    opt.clock.rewind_window()
    opt._start_window()
    opt._build_pass()  # lets go of the state tensors that were replaced
    if own is not None:
        _load_own(opt, own)


def _part(state: dict[str, Any], groups: list[dict[str, Any]], first: int) -> dict[str, Any]:
    """One inner optimizer's share of a saved state, numbered from 0 again."""
    indices = [index for group in groups for index in group["params"]]
    values = {index - first: state["state"][index] for index in indices if index in state["state"]}
    renumbered = [{**g, "params": [index - first for index in g["params"]]} for g in groups]
    return {"state": values, "param_groups": renumbered}


def _check_groups(opt: ClockedOptimizer, state: dict[str, Any]) -> None:
    if not {"state", "param_groups"} <= state.keys():
        raise ValueError(
            "ClockedOptimizer.load_state_dict: the state lacks 'state' and 'param_groups', got "
            f"{sorted(map(str, state))}; pass what state_dict() gave"
        )
    saved = [len(group["params"]) for group in state["param_groups"]]
    here = [len(group["params"]) for group in opt.param_groups]
    if saved != here:
        raise ValueError(
            f"ClockedOptimizer.load_state_dict: the state has groups of {saved} parameters, this "
            f"optimizer of {here}; build the same groups before loading"
        )


def _check_own(opt: ClockedOptimizer, own: dict[str, Any]) -> None:
    if own.get("version") != _VERSION:
        raise ValueError(
            f"ClockedOptimizer.load_state_dict: the state has version {own.get('version')!r}, this "
            f"release reads {_VERSION}"
        )
    opt._schedulers.check_state(own["schedulers"])
    saved, scale = own["loss_scale"], opt._loss_scale
    if isinstance(saved, dict) != isinstance(scale, LossScale) or (saved is None) != (
        scale is None
    ):
        raise ValueError(
            f"ClockedOptimizer.load_state_dict: the state has loss_scale={saved!r}, this wrapper "
            f"{scale!r}; construct it with the same kind of loss scale"
        )
    for row, grad in own["accumulators"].items():
        p = opt._pass.rows.params[row]
        if grad.shape != p.shape:
            raise ValueError(
                "ClockedOptimizer.load_state_dict: the accumulator of "
                f"{opt._pass.names[row]!r} has shape {tuple(grad.shape)}, its parameter "
                f"{tuple(p.shape)}"
            )


def _load_own(opt: ClockedOptimizer, own: dict[str, Any]) -> None:
    opt.clock.load_state_dict(own["clock"])
    saved = own["loss_scale"]
    opt._loss_scale = LossScale(**saved) if isinstance(saved, dict) else saved
    opt._consecutive_skips = own["consecutive_skips"]
    opt._schedulers.load_state_dict(own["schedulers"])
    params = opt._pass.rows.params
    accumulators: dict[int, Tensor] = {
        row: grad.detach().clone().to(params[row].device)
        for row, grad in own["accumulators"].items()
    }
    opt._pass.accumulator.restore(accumulators)
    opt._window = Window.from_state_dict(own["window"])


def pack(opt: ClockedOptimizer) -> dict[str, Any]:
    """Attributes for a copy. Accumulators go along: copying a parameter leaves its ``.grad``."""
    state = {name: value for name, value in vars(opt).items() if name not in _DERIVED}
    state["_backend"] = opt._backend.name
    state["held"] = opt._pass.accumulator.held()
    return state


def unpack(opt: ClockedOptimizer, state: dict[str, Any]) -> None:
    """Makes `opt` the wrapper that `pack` described."""
    held = state.pop("held")
    opt.__dict__.update(state)
    opt._backend = ops.make_backend(state["_backend"])
    opt._build_pass()
    if held:
        opt._pass.accumulator.restore(held)
