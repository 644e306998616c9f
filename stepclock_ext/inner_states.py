"""Saved states of the inner optimizers: checked, shared out, and kept in their dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import ops
from .update_rules import RULES

if TYPE_CHECKING:
    from .optimizer import ClockedOptimizer

__all__ = ["check_groups", "check_states", "keep_dtypes", "part_of"]

_WHERE = "ClockedOptimizer.load_state_dict"


def keep_dtypes(inner: Optimizer, part: dict[str, Any]) -> None:
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


def check_states(opt: ClockedOptimizer, state: dict[str, Any]) -> None:
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


def part_of(state: dict[str, Any], groups: list[dict[str, Any]], first: int) -> dict[str, Any]:
    """One inner optimizer's share of a saved state, numbered from 0 again."""
    indices = [index for group in groups for index in group["params"]]
    values = {index - first: state["state"][index] for index in indices if index in state["state"]}
    renumbered = [{**g, "params": [index - first for index in g["params"]]} for g in groups]
    return {"state": values, "param_groups": renumbered}


def check_groups(opt: ClockedOptimizer, state: dict[str, Any]) -> None:
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
