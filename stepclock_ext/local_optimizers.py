"""Optimizers of what lies in this process, for inner ones whose parameters are DTensors.

Kernels, norms, masters and averages work on local parts. The states stay the inner optimizer's own,
as DTensors, so that ``torch.distributed.checkpoint`` saves them and loads them on another mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from .dtensors import is_dtensor, like_parameter, local_gradient, local_part, owns_copy
from .part_optimizers import copy_options, like_group, make_like
from .update_rules import RULES

__all__ = ["LocalOptimizers", "has_dtensors"]


def has_dtensors(optimizers: Iterable[Optimizer]) -> bool:
    """Whether a parameter is spread over a mesh."""
    groups = (group for inner in optimizers for group in inner.param_groups)
    return any(is_dtensor(p) for group in groups for p in group["params"])


class LocalOptimizers:
    """The local parts of some optimizers' parameters.

    Args:
        inners: whose options and states hold.

    Attributes:
        optimizers: like `inners`, of the local parts; what a pass is built on.
        params: the whole parameters, one a row.
        locals: their local parts.
    """

    def __init__(self, inners: Sequence[Optimizer]) -> None:
        self._inners = list(inners)
        self.params = [p for inner in inners for g in inner.param_groups for p in g["params"]]
        self.locals = [local_part(p) for p in self.params]
        self._steps_itself = [_steps_itself(inner) for inner in inners]
        self.optimizers = [self._make(inner) for inner in inners]
        self._known: list[list[Any]] = [[] for _ in inners]
        self.counted = [owns_copy(p) for p in self.params]

    def is_current(self, groups: Iterable[dict[str, Any]]) -> bool:
        """Whether these are still the groups, the local parts, and the way to step."""
        params = [p for group in groups for p in group["params"]]
        return (
            len(params) == len(self.params)
            and all(map(is_, params, self.params))
            and all(map(is_, map(local_part, params), self.locals))
            and self._steps_itself == [_steps_itself(inner) for inner in self._inners]
        )

    def bring_gradients(self) -> None:
        """The local parts' gradients are those of the parameters."""
        for p, local in zip(self.params, self.locals, strict=True):
            if p is not local:
                local.grad = local_gradient(p)

    def clear_gradients(self) -> None:
        """No parameter has a gradient."""
        for p, local in zip(self.params, self.locals, strict=True):
            p.grad = local.grad = None

    def follow(self) -> None:
        """Takes over what has been set in groups and states since the last update."""
        for i, (inner, own) in enumerate(zip(self._inners, self.optimizers, strict=True)):
            if own is inner:
                continue
            copy_options(inner, own)
            if not isinstance(own, _StepOfInner):
                self._read_states(i, inner, own)

    def publish(self) -> None:
        """Gives the inner optimizers the states that an update has made."""
        for i, (inner, own) in enumerate(zip(self._inners, self.optimizers, strict=True)):
            if own is inner or isinstance(own, _StepOfInner):
                continue
            for p, local in self._pairs(inner):
                state = own.state.get(local, {})
                if state.keys() != inner.state.get(p, {}).keys():
                    spread = {key: _spread(p, local, key, value) for key, value in state.items()}
                    inner.state[p] = spread
            self._read_states(i, inner, own)

    def spread(self, tensors: dict[int, Tensor]) -> dict[int, Tensor]:
        """Tensors by row as DTensors like their parameters."""
        return {row: like_parameter(self.params[row], tensor) for row, tensor in tensors.items()}

    def cut(self, tensors: dict[int, Tensor]) -> dict[int, Tensor]:
        """The local parts of tensors by row, which are spread or whole."""
        return {row: local_part(tensor) for row, tensor in self.spread(tensors).items()}

    def spread_values(self, of_local: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """The same by parameter, from a dict by local part."""
        pairs = zip(self.params, self.locals, strict=True)
        return {p: like_parameter(p, of_local[local]) for p, local in pairs if local in of_local}

    def spread_states(self) -> None:
        """Whole states that the inner optimizers have loaded become parts, as DTensors."""
        for inner in self._inners:
            for p, _ in self._pairs(inner):
                state = inner.state.get(p, {})
                for key, value in state.items():
                    if isinstance(value, Tensor) and key != "step" and value.shape == p.shape:
                        state[key] = like_parameter(p, value)

    def _make(self, inner: Optimizer) -> Optimizer:
        if not has_dtensors([inner]):
            return inner
        groups = [like_group(g, map(local_part, g["params"])) for g in inner.param_groups]
        return _StepOfInner(inner, groups) if _steps_itself(inner) else make_like(inner, groups)

    def _pairs(self, inner: Optimizer) -> Iterable[tuple[Tensor, Tensor]]:
        for group in inner.param_groups:
            for p in group["params"]:
                yield p, local_part(p)

    def _read_states(self, index: int, inner: Optimizer, own: Optimizer) -> None:
        now = list(inner.state.values())
        if len(now) == len(self._known[index]) and all(map(is_, now, self._known[index])):
            return
        own.state.clear()
        for p, local in self._pairs(inner):
            if inner.state.get(p):
                own.state[local] = {
                    key: local_part(value) if isinstance(value, Tensor) else value
                    for key, value in inner.state[p].items()
                }
        self._known[index] = now


class _StepOfInner(Optimizer):
    """Local parts whose optimizer steps by itself, on the DTensors."""

    def __init__(self, inner: Optimizer, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})
        self._inner = inner

    def step(self, closure: Any = None) -> Any:
        """The inner optimizer's step: its gradients share the local ones' memory."""
        return self._inner.step(closure)

    step.hooked = True  # type: ignore[attr-defined]  # torch's global step hooks see the inner one


def _steps_itself(inner: Optimizer) -> bool:
    """No fused rule runs: another kind of optimizer, step hooks, or a step that was replaced."""
    hooks = inner._optimizer_step_pre_hooks or inner._optimizer_step_post_hooks
    return type(inner) not in RULES or bool(hooks)


def _spread(p: Tensor, local: Tensor, key: str, value: Any) -> Any:
    is_part = isinstance(value, Tensor) and key != "step" and value.shape == local.shape
    return like_parameter(p, value) if is_part else value
