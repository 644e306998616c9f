"""What a checkpoint may hold, and whether a model and an optimizer are those that it is of."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .dtensors import is_dtensor, like_parameter
from .optimizer import ClockedOptimizer

__all__ = [
    "bare_model",
    "check_model",
    "check_optimizer",
    "name_parts",
    "owner_of",
    "spread_weights",
    "to_plain",
]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def to_plain(value: Any, where: str) -> Any:
    """`value` in types that ``torch.load(weights_only=True)`` reads.

    Numbers of NumPy become Python's, mappings become dicts.

    Raises:
        TypeError: something in it has no such type; the message says where it stands.

    Example:
        >>> to_plain({"seen": [1, object()]}, "extra")
        Traceback (most recent call last):
        ...
        TypeError: save_checkpoint: 'extra, seen, 1' must be a tensor or a plain value, got object
    """
    kind = type(value)
    if kind in _PLAIN or kind in (Tensor, torch.nn.Parameter):
        return value
    if kind in (list, tuple):
        return kind(to_plain(item, f"{where}, {i}") for i, item in enumerate(value))
    if isinstance(value, Mapping):
        kept = OrderedDict if kind is OrderedDict else dict
        pairs = ((key, to_plain(item, f"{where}, {key}")) for key, item in value.items())
        return kept((to_plain(key, f"{where}, key {key!r}"), item) for key, item in pairs)
    if isinstance(value, (bool, int, float, str)):
        base = next(t for t in (bool, int, float, str) if isinstance(value, t))
        return base(value)
    if getattr(value, "shape", None) == () and not isinstance(value, Tensor):
        return to_plain(value.item(), where)
    raise TypeError(
        f"save_checkpoint: {where!r} must be a tensor or a plain value, got {kind.__name__}"
    )


def bare_model(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside DDP, whose names are those of a single process."""
    if isinstance(model, DistributedDataParallel):
        found: torch.nn.Module = model.module
        return found
    return model


def name_parts(model: torch.nn.Module, optimizer: ClockedOptimizer) -> dict[str, list[Any]]:
    """The inner optimizers' types, and the names of each group's parameters in order.

    Raises:
        ValueError: a parameter of the optimizer is none of the model's.
    """
    known = {id(p): name for name, p in model.named_parameters()}
    groups = []
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            if id(p) not in known:
                raise ValueError(
                    "checkpoint: the model must hold every parameter of the optimizer, got none "
                    f"for parameter {i} of group {g}, of shape {tuple(p.shape)}; pass a module "
                    "that holds them all, such as torch.nn.ModuleList([model, loss])"
                )
        groups.append([known[id(p)] for p in group["params"]])
    return {
        "optimizers": [type(inner).__name__ for inner in optimizer.optimizers],
        "groups": groups,
    }


def owner_of(
    weights: Mapping[str, Any], optimizer: ClockedOptimizer
) -> Callable[[tuple[Any, ...]], Tensor | None]:
    """Finds the weight or parameter here that a saved tensor belongs to, by the way to it.

    States, masters and averages are kept by the number of their parameter.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]

    def find(at: tuple[Any, ...]) -> Tensor | None:
        if at[0] == "model":
            found = weights.get(at[1])
            return found if isinstance(found, Tensor) else None
        row = next((part for part in at if type(part) is int), -1)
        return params[row] if row in range(len(params)) else None

    return find


def spread_weights(here: Mapping[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """`saved` as the model here wants it: spread where its weights are, else as it is."""
    for name, value in saved.items():
        if is_dtensor(here[name]):
            saved[name] = like_parameter(here[name], value)
    return saved


def check_model(path: Path, here: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuses the weights of another model than that whose ``state_dict()`` is `here`.

    Raises:
        ValueError: names, shapes or dtypes differ.
    """
    faults = [f"{name} is missing in the file" for name in here.keys() - saved.keys()]
    faults += [f"{name} is in the file alone" for name in saved.keys() - here.keys()]
    for name in here.keys() & saved.keys():
        there, now = _describe(saved[name]), _describe(here[name])
        if there != now:
            faults.append(f"{name} is {there} in the file, {now} here")
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise ValueError(
            f"load_checkpoint: the model must be the one of {path}, got another: "
            f"{'; '.join(sorted(faults)[:3])}{more}; build the same model, or pass another file"
        )


def check_optimizer(path: Path, here: dict[str, list[Any]], saved: Mapping[str, Any]) -> None:
    """Refuses the state of other optimizers, or of the same parameters in another order.

    Raises:
        ValueError: types, groups or the order of parameters differ, or there is no clock.
    """
    if not isinstance(saved["optimizer"], dict) or "stepclock" not in saved["optimizer"]:
        raise ValueError(
            f"load_checkpoint: {path} must hold the state of a ClockedOptimizer, got one without "
            "'stepclock'; pass another file"
        )
    for part in ("optimizers", "groups"):
        there = saved["names"][part]
        if there != here[part]:
            raise ValueError(
                f"load_checkpoint: the optimizer must have the {part} of {path}, "
                f"{_shorten(there)}, got {_shorten(here[part])}; build the same one"
            )


def _shorten(value: list[Any]) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]} ..."


def _describe(value: Any) -> str:
    """Shape and dtype of a tensor; of what else a module keeps, nothing."""
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else "no tensor"
