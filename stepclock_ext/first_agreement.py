"""What ranks compare, or share, before the first window: options, plan, seed and parameters."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .companions import ParameterCompanions
from .distributed import Processes, data_parallel_size
from .parameter_agreement import broadcast_parameters, check_parameters, check_shapes
from .plan import TrainPlan
from .ranks import Ranks

__all__ = ["agree_on_parameters", "check_options", "check_plan", "share_seed"]


def check_options(ranks: Ranks, options: Mapping[str, Any]) -> None:
    """Sees to it that every rank was given the same.

    Raises:
        ValueError: an option differs, on every rank.
    """
    marks = [float(zlib.crc32(repr(value).encode())) for value in options.values()]
    told = ranks.gather(marks, "the comparison of options")
    for name, numbers in zip(options, zip(*told, strict=True), strict=True):
        if len(set(numbers)) > 1:
            others = [r for r, number in enumerate(numbers) if number != numbers[0]]
            raise ValueError(
                f"ClockedOptimizer: {name} must be the same on all ranks, got "
                f"{options[name]!r} on rank {ranks.rank}, and ranks {others} have others "
                "than rank 0; construct every rank's wrapper alike"
            )


def check_plan(processes: Processes, plan: TrainPlan | None) -> None:
    """Refuses a plan for another number of processes.

    Raises:
        ValueError: it is one.
    """
    size = data_parallel_size(processes)
    is_known = processes.engine is None or processes.engine.num_averaged is not None
    if plan is not None and is_known and plan.world_size != size:
        raise ValueError(
            f"ClockedOptimizer: the plan's world_size must be the {size} processes that read "
            f"different data, got {plan.world_size}; plan with world_size={size}"
        )


def share_seed(processes: Processes, companions: ParameterCompanions) -> None:
    """Equal copies of a parameter are rounded alike: by the seed of rank 0.

    Shares are not equal copies: each rank rounds its own by a seed of its own.
    """
    if companions.rounding_seed is None:
        return
    halves = [companions.rounding_seed >> 32, companions.rounding_seed & 0xFFFFFFFF]
    high, low = processes.ranks.gather([float(half) for half in halves], "the shared seed")[0]
    is_shared_out = processes.options is not None and processes.options.shard_states
    seed = (int(high) << 32) + int(low) + (processes.ranks.rank if is_shared_out else 0)
    companions.rounding_seed = seed & (2**64 - 1)


def agree_on_parameters(
    processes: Processes, params: Sequence[Tensor], names: Sequence[str]
) -> None:
    """Sees to it that every rank begins alike; an engine does that for what it knows.

    Raises:
        ValueError: a parameter differs, and is not to be broadcast.
    """
    if processes.engine is not None:
        rest = set(processes.engine.rest)
        names = [name for p, name in zip(params, names, strict=True) if p in rest]
        params = [p for p in params if p in rest]
    if not params:
        return
    check_shapes(params, names, processes.ranks)
    if processes.options is not None and processes.options.broadcast_parameters:
        broadcast_parameters(params, processes.ranks)
    check_parameters(params, names, processes.ranks)
