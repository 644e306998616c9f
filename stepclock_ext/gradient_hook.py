"""The hook on one parameter that hands its gradients to a catcher."""

from __future__ import annotations

import weakref
from typing import Protocol

from torch import Tensor

__all__ = ["Catcher", "GradientHook", "has_hook", "remove_hooks"]


class Catcher(Protocol):
    is_disturbed: bool

    def catch(self, row: int) -> None:
        """Takes the row's gradient out of ``.grad``."""
        ...


class GradientHook:
    """Hands each gradient of a parameter to its owner, and does not keep that alive."""

    def __init__(self, owner: Catcher, row: int) -> None:
        self._owner = weakref.ref(owner)
        self._row = row

    def leave(self) -> None:
        """Tells the owner that its hook is taken off."""
        owner = self._owner()
        if owner is not None:
            owner.is_disturbed = True

    def is_of(self, owner: Catcher) -> bool:
        """Whether it feeds that owner."""
        return self._owner() is owner

    def __call__(self, p: Tensor) -> None:
        owner = self._owner()
        if owner is not None:
            owner.catch(self._row)


def has_hook(p: Tensor, owner: Catcher) -> bool:
    """Whether the parameter feeds that owner."""
    hooks = (p._post_accumulate_grad_hooks or {}).values()
    return any(isinstance(hook, GradientHook) and hook.is_of(owner) for hook in hooks)


def remove_hooks(p: Tensor, owner: Catcher | None) -> bool:
    """Takes off such hooks of all but `owner`; whether the owner's is there."""
    hooks = p._post_accumulate_grad_hooks or {}
    ours = {key: hook for key, hook in hooks.items() if isinstance(hook, GradientHook)}
    kept = {key for key, hook in ours.items() if owner is not None and hook.is_of(owner)}
    for key in ours.keys() - kept:
        ours[key].leave()
        del hooks[key]
    return bool(kept)
