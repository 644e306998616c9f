"""Optimizers of parts of parameters: they have the options of those whose parameters are whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["copy_options", "like_group", "make_like"]

# What a group of parts has for itself.
_OWN_KEYS = ("params", "param_names")


def like_group(group: dict[str, Any], parts: Iterable[Tensor]) -> dict[str, Any]:
    """A group of `parts` with the options of another."""
    return {**_options(group), "params": list(parts)}


def make_like(inner: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """An optimizer of the same kind, of other groups."""
    kind: Any = type(inner)
    made: Optimizer = kind(groups)
    return made


def copy_options(inner: Optimizer, own: Optimizer) -> None:
    """Gives `own` what schedulers and users have set in the groups of `inner`."""
    inner._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers look for it
    for group, ours in zip(inner.param_groups, own.param_groups, strict=True):
        ours.update(_options(group))


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _OWN_KEYS}
