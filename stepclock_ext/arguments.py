"""The door: one check for each argument of the wrapper, one clear error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from .ema import EMA
from .facade import OptimizerFacade
from .loss_scale import LossScale

__all__ = [
    "check_closure_optimizer",
    "check_count",
    "check_ema",
    "check_loss",
    "check_loss_scale",
    "check_max_norm",
    "check_new_group",
    "check_noise_scale",
    "check_norm_type",
    "check_policies",
    "check_weight",
    "first_device",
    "list_optimizers",
]

_WHERE = "ClockedOptimizer"


def check_count(name: str, value: Any) -> int:
    """`value`, a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{_WHERE}: {name} must be an integer, got {value!r}")
    if value < 1:
        raise ValueError(f"{_WHERE}: {name} must be 1 or more, got {value}")
    return value


_POLICIES = {
    "reduction": ("mean", "sum"),
    "nonfinite": ("skip", "raise", "propagate"),
    "tail": ("flush", "carry", "drop"),
    "rounding": ("nearest", "stochastic"),
}


def check_policies(**given: Any) -> None:
    """Refuses a policy that does not exist."""
    for name, value in given.items():
        if value not in _POLICIES[name]:
            listed = ", ".join(map(repr, _POLICIES[name]))
            raise ValueError(f"{_WHERE}: {name} must be one of {listed}, got {value!r}")


def check_ema(value: Any) -> EMA | None:
    """`value`, an `EMA` that has no wrapper yet, or None."""
    if value is None:
        return None
    if not isinstance(value, EMA):
        raise TypeError(
            f"{_WHERE}: ema must be an EMA or None, got {value!r}; pass EMA(decay=0.999)"
        )
    if value.is_bound:
        raise ValueError(
            f"{_WHERE}: ema must belong to one wrapper, got one that has another; construct a "
            "second EMA"
        )
    return value


def check_noise_scale(value: Any, *, norm_type: float) -> None:
    """Refuses what is no bool, and norms that say nothing about the noise."""
    if not isinstance(value, bool):
        raise TypeError(f"{_WHERE}: noise_scale must be True or False, got {value!r}")
    if value and norm_type != 2.0:
        raise ValueError(
            f"{_WHERE}: noise_scale must go with norm_type=2.0, got {norm_type}; the noise scale "
            "is made of squared norms"
        )


def check_max_norm(value: Any) -> float | None:
    """`value`, positive (infinity measures without clipping) or None."""
    if value is None:
        return None
    number = _number("max_grad_norm", value, "pass None to turn clipping off")
    if not number > 0:
        raise ValueError(
            f"{_WHERE}: max_grad_norm must be positive, got {number}; pass None to turn clipping "
            "off"
        )
    return number


def check_norm_type(value: Any) -> float:
    """`value`, a positive p or infinity."""
    number = _number(
        "norm_type", value, "2.0 is the usual norm, float('inf') the largest magnitude"
    )
    if not number > 0:
        raise ValueError(
            f"{_WHERE}: norm_type must be positive, got {number}; 2.0 is the usual norm"
        )
    return number


def check_loss_scale(value: Any, nonfinite: str) -> LossScale | float | None:
    """`value`: None, a positive static scale, or a `LossScale`."""
    if value is None:
        return None
    if isinstance(value, LossScale):
        if nonfinite == "propagate":
            raise ValueError(
                f"{_WHERE}: nonfinite='propagate' cannot go with a dynamic loss scale, which finds "
                "its scale by skipping; use nonfinite='skip' or a static scale"
            )
        return value
    number = _number("loss_scale", value, "pass None, a float or a LossScale")
    if not 0 < number < math.inf:
        raise ValueError(f"{_WHERE}: loss_scale must be positive and finite, got {number}")
    return number


def check_weight(value: Any) -> float:
    """`value`, a finite weight of 0 or more; a tensor of one element is read (and waited for)."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    number = _number("weight", value, "pass the tokens or samples of the micro batch", "backward")
    if not 0 <= number < math.inf:
        raise ValueError(
            f"{_WHERE}.backward: weight must be finite and 0 or more, got {number}; pass the "
            "tokens or samples that the loss is the mean of"
        )
    return number


def check_loss(loss: Any, *, needs_grad: bool) -> None:
    """Refuses what cannot be differentiated as a micro step's loss."""
    where = f"{_WHERE}.backward: loss"
    if not isinstance(loss, Tensor):
        raise TypeError(f"{where} must be a tensor, got {type(loss).__name__}")
    if loss.numel() != 1:
        raise ValueError(
            f"{where} must be a scalar, got shape {tuple(loss.shape)}; take its mean, and pass "
            "what it is the mean of as weight="
        )
    if loss.is_complex():
        raise TypeError(f"{where} must be real, got {loss.dtype}; take its absolute value or .real")
    if needs_grad and not loss.requires_grad:
        raise ValueError(
            f"{where} must require grad, got one that does not; was the forward run under no_grad?"
        )


def list_optimizers(optimizer: Any) -> list[Optimizer]:
    """The inner optimizers: one, or a sequence of them that share no parameter."""
    given = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    for inner in given:
        if not isinstance(inner, Optimizer) or isinstance(inner, OptimizerFacade):
            raise TypeError(
                f"{_WHERE}: optimizer must be a torch Optimizer and no wrapper, got {inner!r}"
            )
        for group in inner.param_groups:
            _refuse_differentiable(group)
    params = [p for inner in given for group in inner.param_groups for p in group["params"]]
    if not params:
        raise ValueError(f"{_WHERE}: optimizer must hold at least one parameter, got none")
    if len({id(p) for p in params}) < len(params):
        raise ValueError(
            f"{_WHERE}: a parameter must belong to one optimizer, got one that belongs to several"
        )
    return given


def first_device(optimizers: Sequence[Optimizer]) -> torch.device:
    """Where the first parameter is."""
    params = (p for inner in optimizers for group in inner.param_groups for p in group["params"])
    first: Tensor = next(params)
    return first.device


def check_new_group(group: dict[str, Any], others: Sequence[Optimizer]) -> None:
    """Refuses a group that is to be added: `others` are the optimizers that do not get it."""
    _refuse_differentiable(group)
    params = group["params"]
    new = {id(p) for p in ([params] if isinstance(params, Tensor) else list(params))}
    taken = (p for inner in others for old in inner.param_groups for p in old["params"])
    if any(id(p) in new for p in taken):
        raise ValueError(
            f"{_WHERE}.add_param_group: a parameter must belong to one optimizer, got one that "
            "another inner optimizer has"
        )


def _refuse_differentiable(group: dict[str, Any]) -> None:
    if group.get("differentiable"):
        raise ValueError(
            f"{_WHERE}: differentiable=True cannot go with accumulation in place; use the "
            "optimizer without this wrapper"
        )


def check_closure_optimizer(
    optimizers: Sequence[Optimizer], accumulation_steps: int, loss_scale: LossScale | float | None
) -> bool:
    """Whether the one optimizer is LBFGS, which evaluates its closure as often as it needs."""
    if not any(isinstance(inner, LBFGS) for inner in optimizers):
        return False
    reasons = {
        "several optimizers": len(optimizers) > 1,
        f"gradient_accumulation_steps={accumulation_steps}": accumulation_steps > 1,
        f"loss_scale={loss_scale}": loss_scale is not None,
    }
    for reason, refused in reasons.items():
        if refused:
            raise ValueError(
                f"{_WHERE}: LBFGS evaluates its closure many times in one update and cannot go "
                f"with {reason}; use windows of one, without a loss scale"
            )
    return True


def _number(name: str, value: Any, way_out: str, method: str = "") -> float:
    if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__"):
        where = f"{_WHERE}.{method}" if method else _WHERE
        raise TypeError(f"{where}: {name} must be a number, got {value!r}; {way_out}")
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise TypeError(f"{_WHERE}: {name} must be a number, got shape {tuple(value.shape)}")
    return float(value)
