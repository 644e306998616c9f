"""What a wrapper saves and loads of masters, averages, rounding and noise."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .noise_scale import NoiseScale

if TYPE_CHECKING:
    from .optimizer import ClockedOptimizer

__all__ = ["SavedCompanions", "apply", "read", "save"]

_WHERE = "ClockedOptimizer.load_state_dict"


def save(opt: ClockedOptimizer) -> dict[str, Any]:
    """Plain values and tensors; tensors as they are, like an optimizer's moments."""
    params, along, accumulator = opt._pass.moved_rows.params, opt._companions, opt._pass.accumulator
    norms, noise = accumulator.norms, opt._noise
    masters = None if along.masters is None else along.masters.state_dict(params)
    ema = None if along.ema is None else along.ema.state_dict(params)
    if ema is not None:
        ema["averages"] = _whole(opt, ema["averages"])
    return {
        "masters": None if masters is None else _whole(opt, masters),
        "ema": ema,
        "rounding_seed": along.rounding_seed,
        "noise_scale": None if noise is None else dict(vars(noise)),
        "micro_norms": None if norms is None else norms.state_dict(accumulator.grads()),
    }


def _whole(opt: ClockedOptimizer, tensors: dict[int, Tensor]) -> dict[int, Tensor]:
    """`tensors` as they are beside whole parameters."""
    shards = opt._pass.shards
    if opt._locals is not None:
        return opt._locals.spread(tensors)
    if shards is None:
        return tensors
    whole = shards.gather([tensors.get(row) for row in range(len(shards.slices))])
    return {row: tensor for row, tensor in enumerate(whole) if tensor is not None}


def _mine(opt: ClockedOptimizer, tensors: dict[int, Tensor]) -> dict[int, Tensor]:
    """`tensors` as they are beside what this process updates."""
    shards = opt._pass.shards
    if opt._locals is not None:
        return opt._locals.cut(tensors)
    if shards is None:
        return tensors
    return {row: shards.cut(row, tensor) for row, tensor in tensors.items()}


@dataclass(frozen=True, eq=False)
class SavedCompanions:
    """The saved values, checked; None for what the state does not hold."""

    masters: dict[int, Tensor] | None
    ema: dict[str, Any] | None
    rounding_seed: int | None
    noise: NoiseScale | None
    micro_norms: dict[str, Any] | None


def read(opt: ClockedOptimizer, own: dict[str, Any]) -> SavedCompanions:
    """Reads what `save` wrote, and changes nothing.

    Raises:
        ValueError: an average or a master is of another shape than its parameter.
        KeyError, TypeError, AttributeError: the state is damaged.
    """
    masters, ema = own.get("masters"), own.get("ema")
    noise, seed = own.get("noise_scale"), own.get("rounding_seed")
    norms = own.get("micro_norms")
    if masters is not None:
        _check_shapes(opt, "master", masters)
    if ema is not None:
        _check_shapes(opt, "average", ema["averages"])
        ema = {"updates": operator.index(ema["updates"]), "averages": dict(ema["averages"])}
    if norms is not None:
        norms = {"total": float(norms["total"]), "num_micro": int(norms["num_micro"])}
    return SavedCompanions(
        masters=None if masters is None else dict(masters),
        ema=ema,
        rounding_seed=None if seed is None else operator.index(seed),
        noise=None if noise is None else NoiseScale(**noise),
        micro_norms=norms,
    )


def _check_shapes(opt: ClockedOptimizer, what: str, tensors: dict[int, Tensor]) -> None:
    params = [p for group in opt._groups for p in group["params"]]
    for row, tensor in tensors.items():
        if row not in range(len(params)):
            raise ValueError(f"{_WHERE}: the state has an {what} for parameter {row}")
        if tensor.shape != params[row].shape:
            raise ValueError(
                f"{_WHERE}: the {what} of {opt._pass.names[row]!r} is {tuple(tensor.shape)}, its "
                f"parameter {tuple(params[row].shape)}"
            )


def apply(opt: ClockedOptimizer, saved: SavedCompanions | None) -> list[str]:
    """Takes over `saved`; None is the state of a bare optimizer. Returns what is lost or made."""
    params, along, said = opt._pass.moved_rows.params, opt._companions, []
    saved = saved or SavedCompanions(None, None, None, None, None)
    if along.masters is not None:
        misfits = along.masters.load_state_dict(params, _mine(opt, saved.masters or {}))
        if saved.masters is None:
            said.append("created master weights from the 16-bit parameters: the state has none")
        if misfits:
            said.append(f"dropped the masters of {misfits} parameters of another dtype or shape")
    elif saved.masters:
        said.append("dropped the master weights of the state: master_weights=False here")
    if along.ema is not None:
        ema = saved.ema or {"updates": 0, "averages": {}}
        along.ema.load_state_dict(params, {**ema, "averages": _mine(opt, ema["averages"])})
        if saved.ema is None:
            said.append("the averages start from the parameters as they are: the state has none")
    elif saved.ema is not None:
        said.append("dropped the averaged weights of the state: ema=None here")
    if along.rounding_seed is not None and saved.rounding_seed is not None:
        along.rounding_seed = saved.rounding_seed
    if opt._noise is not None:
        opt._noise = saved.noise or NoiseScale()
    return said
