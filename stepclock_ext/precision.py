"""In what precision a wrapper adds gradients and keeps 16-bit parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import ops
from .update_rules import RULES

__all__ = ["Precision", "check_pairs", "check_precision", "is_many_processes"]

_WHERE = "ClockedOptimizer"
_PAIRS = (
    "bfloat16 parameters go with float32 or bfloat16, float16 with float32 or float16, wider ones "
    "with their own dtype"
)


@dataclass(frozen=True)
class Precision:
    """What was asked for; it concerns 16-bit parameters alone.

    Attributes:
        accumulate_dtype: of the window's sums; None is fp32 for windows of several micro steps.
        master_weights: exact fp32 values are kept beside 16-bit parameters.
        stochastic: 16-bit parameters are rounded stochastically.
    """

    accumulate_dtype: torch.dtype | None = None
    master_weights: bool = False
    stochastic: bool = False

    def is_wide(self, steps: int, *, reduced_by: str | None = None) -> bool:
        """Whether the sums of 16-bit gradients are fp32 in windows of `steps` micro steps.

        Args:
            steps: micro steps in a window.
            reduced_by: who adds them over processes: "us", "engine", or None.
        """
        if self.accumulate_dtype is None:
            if reduced_by is not None:
                return reduced_by == "us"
            return steps > 1 and not is_many_processes()
        return self.accumulate_dtype == torch.float32

    @property
    def needs_rule(self) -> bool:
        """Only a fused update rule can do it."""
        return self.master_weights or self.stochastic


def is_many_processes() -> bool:
    """A reducer of torch.distributed works on ``.grad`` itself, so it has to stay there."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return False
    return distributed.get_world_size() > 1


def check_precision(
    optimizers: Sequence[Optimizer],
    *,
    accumulate_dtype: Any,
    master_weights: Any,
    rounding: str,
    needs_closure: bool,
    reduced_by: str | None = None,
) -> Precision:
    """The precision asked for, if these optimizers can have it.

    Raises:
        TypeError: `accumulate_dtype` is no dtype, `master_weights` no bool.
        ValueError: the dtypes do not go together, or an optimizer has no fused rule that keeps
            masters or rounds stochastically.
        RuntimeError: fp32 accumulators were asked for in a run of several processes.
    """
    params = [p for inner in optimizers for group in inner.param_groups for p in group["params"]]
    check_pairs(params, accumulate_dtype, among_all=True)
    if not isinstance(master_weights, bool):
        raise TypeError(f"{_WHERE}: master_weights must be True or False, got {master_weights!r}")
    stochastic = rounding == "stochastic"
    if master_weights and stochastic:
        raise ValueError(
            f"{_WHERE}: rounding must be 'nearest' with master_weights=True, got 'stochastic'; "
            "masters lose nothing that rounding could keep, so leave one of them out"
        )
    precision = Precision(accumulate_dtype, master_weights, stochastic)
    for inner in optimizers:
        if precision.needs_rule and type(inner) not in RULES:
            asked = "master_weights=True" if master_weights else "rounding='stochastic'"
            names = ", ".join(sorted(rule.__name__ for rule in RULES))
            raise ValueError(
                f"{_WHERE}: {asked} must go with an optimizer that has a fused update rule "
                f"({names}), got {type(inner).__name__}; use one of these, or leave it out"
            )
    if accumulate_dtype == torch.float32 and any(p.dtype in ops.HALVES for p in params):
        _refuse_wide(needs_closure=needs_closure, reduced_by=reduced_by)
    return precision


def _refuse_wide(*, needs_closure: bool, reduced_by: str | None) -> None:
    if needs_closure:
        raise ValueError(
            f"{_WHERE}: accumulate_dtype must be None with LBFGS, got torch.float32; it reads "
            "gradients of the parameter's dtype"
        )
    if reduced_by == "engine" or (reduced_by is None and is_many_processes()):
        raise RuntimeError(
            f"{_WHERE}: accumulate_dtype must be None under torch.distributed, got torch.float32; "
            "a reducer needs the gradients in .grad. Pass process_group= in place of DDP: it "
            "reduces fp32 sums"
        )


def check_pairs(
    params: Tensor | Iterable[Tensor], accumulate_dtype: Any, *, among_all: bool = False
) -> None:
    """Refuses parameters whose gradients cannot be added in `accumulate_dtype`.

    Args:
        params: of a group, or one.
        accumulate_dtype: as asked for.
        among_all: `params` are all there are, so that one of them must want a 16-bit dtype.
    """
    if accumulate_dtype is None:
        return
    if not isinstance(accumulate_dtype, torch.dtype):
        raise TypeError(
            f"{_WHERE}: accumulate_dtype must be a torch dtype or None, got {accumulate_dtype!r}; "
            "pass torch.float32"
        )
    own = {p.dtype for p in ([params] if isinstance(params, Tensor) else params)}
    misfits = {dtype for dtype in own if not _goes_with(ops.real_dtype(dtype), accumulate_dtype)}
    is_wanted = accumulate_dtype in {torch.float32, *map(ops.real_dtype, own)}
    if misfits or (among_all and not is_wanted):
        found = ", ".join(sorted(str(dtype) for dtype in misfits or own))
        raise ValueError(
            f"{_WHERE}: accumulate_dtype must go with the parameters' dtypes, got "
            f"{accumulate_dtype} for {found}; {_PAIRS}"
        )


def _goes_with(own: torch.dtype, accumulate_dtype: torch.dtype) -> bool:
    """Parameters of more than 16 bits accumulate in their own dtype whatever is asked for."""
    if own == accumulate_dtype:
        return True
    if own in ops.HALVES:
        return accumulate_dtype == torch.float32
    return accumulate_dtype.is_floating_point and accumulate_dtype.itemsize < own.itemsize
