"""FSDP2 (``fully_shard``) reduces: off inside a window, on for its last micro step.

Inside a window FSDP2 keeps whole gradients of its own, out of reach. For a window that ends early
its own end of a backward is called once more, with reduction on: that is not in torch's public
interface (seen with 2.13), and is looked for before it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .dtensors import is_dtensor
from .gradient_mean import average_gradients_
from .ranks import Ranks
from .reductions import Engine

__all__ = ["FsdpReduction", "fsdp_modules"]


def fsdp_modules(model: torch.nn.Module | None) -> list[Any]:
    """The modules of `model` that ``fully_shard`` was called on."""
    if model is None:
        return []
    return [m for m in model.modules() if hasattr(m, "set_requires_gradient_sync")]


class FsdpReduction(Engine):
    """FSDP2's own reduction, told when to work, and what it leaves out.

    Parameters that are no DTensors are averaged by us at the end of a window.

    Args:
        modules: as `fsdp_modules` finds them; empty where the model is not known, and then every
            micro step is reduced.
        ranks: the processes.

    """

    def __init__(self, modules: Sequence[Any], ranks: Ranks) -> None:
        super().__init__(ranks)
        self._modules = list(modules)
        self._is_last: bool | None = None
        self._is_reduced = not modules
        self._has_run = False

    def bind(self, params: Sequence[Tensor], names: Sequence[str]) -> None:
        """The parameters of the wrapper, one a row."""
        self.rest = [p for p in params if not is_dtensor(p)]

    def expect(self, *, is_last: bool) -> None:
        """Before the forward of a micro step: whether it is the last of its window."""
        if self._is_last != is_last:
            self._set_sync(is_last)
        self._is_last = is_last

    def end_micro_step(self) -> None:
        """After the backward of a micro step."""
        self._has_run = True
        self._is_reduced |= bool(self._is_last)

    def backward_nothing(self, loss: Tensor) -> None:
        """A micro step without items: FSDP2 gathers parameters in backward, so it has to run.

        Raises:
            RuntimeError: the loss is not finite, so that even a seed of 0 gives no zero gradients.
        """
        if not torch.isfinite(loss).all():
            raise RuntimeError(
                "ClockedOptimizer.backward: under FSDP2 a loss of weight 0 must be finite, got "
                f"{loss.item()}; divide by max(tokens, 1)"
            )
        torch.autograd.backward(loss, torch.zeros_like(loss))

    @property
    def num_averaged(self) -> int | None:
        for state in map(_state_of, self._modules):
            for group in _groups_of(state):
                return int(group.mesh_info.mesh.size())
        return None  # tensor parallelism alone, or a model that nobody named

    @property
    def reduces_now(self) -> bool:
        """Every backward talks to other ranks."""
        return True

    @property
    def hides_gradients(self) -> bool:
        return self._has_run and not self._is_reduced

    def complete(self, num_rounds: int, what: str, *, is_complete: bool) -> None:
        """Reduces what FSDP2 has kept, and averages what it does not know.

        Raises:
            RuntimeError: this torch has no way to do it, or a rank did not take part.
        """
        if not self._is_reduced:
            self._reduce_kept(what)
        if self.rest:
            average_gradients_(self.rest, self.ranks, what)

    def clear(self) -> None:
        """A new window, with nothing left of the last one."""
        if self.hides_gradients:
            for param in self._kept_params():
                param.unsharded_accumulated_grad = None
                if hasattr(param, "_unsharded_param"):
                    param.unsharded_param.grad = None
        self._is_reduced = not self._modules
        self._has_run = False

    def _set_sync(self, is_on: bool) -> None:
        for module in self._modules:
            module.set_requires_gradient_sync(is_on, recurse=False)

    def _reduce_kept(self, what: str) -> None:
        """Every rank's gradients go out, zeros where it has none and another has."""
        kept = list(self._kept_params())
        found = self.ranks.any([_kept_gradient(param) is not None for param in kept], what)
        for param, is_there in zip(kept, found, strict=True):
            if is_there and _kept_gradient(param) is None:
                param.unsharded_param.grad = torch.zeros_like(param.unsharded_param)
        self._set_sync(True)
        try:
            for state in self._states():
                if state._is_root:  # None before the first forward
                    self.ranks.call(state._root_post_backward_final_callback, what)
        finally:
            self._set_sync(bool(self._is_last))
        self._is_reduced = True

    def _states(self) -> Iterable[Any]:
        for module in self._modules:
            state = _state_of(module)
            if not hasattr(state, "_root_post_backward_final_callback"):
                raise RuntimeError(
                    "ClockedOptimizer: under FSDP2 a window must have all its micro steps with "
                    f"this torch, got one that ends early with torch {torch.__version__}; plan "
                    "with tail='carry' or 'drop', or use torch 2.13"
                )
            yield state

    def _kept_params(self) -> Iterable[Any]:
        for state in self._states():
            for group in _groups_of(state):
                yield from group.fsdp_params


def _state_of(module: Any) -> Any:
    return module._get_fsdp_state()


def _groups_of(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # one group a state before torch 2.13
        groups = [group for group in [state._fsdp_param_group] if group is not None]
    return list(groups)


def _kept_gradient(param: Any) -> Any:
    if param.unsharded_accumulated_grad is not None:
        return param.unsharded_accumulated_grad
    return param.unsharded_param.grad if hasattr(param, "_unsharded_param") else None
