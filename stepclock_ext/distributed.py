"""Whether this process trains with others, and who adds their gradients."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from .accumulator import Accumulator
from .bucket_reduction import BucketReduction
from .buckets import Buckets
from .ddp_reduction import DdpReduction
from .fsdp_reduction import FsdpReduction, fsdp_modules
from .joint_windows import JointWindows
from .local_optimizers import has_dtensors
from .noise_scale import NoiseSample
from .norm import Across
from .parameters import ParameterRows
from .ranks import Ranks
from .reducer_options import ReducerOptions, check_process_group
from .reductions import Engine
from .sharded_states import refuse_unsharded

if TYPE_CHECKING:
    from .optimizer import ClockedOptimizer

__all__ = ["Processes", "data_parallel_size", "join_processes"]

_COLLECTIVE = re.compile(r"gloo|NCCL|ProcessGroup|[Cc]onnection (closed|reset)|Timed out waiting")


class Processes:
    """The processes that a wrapper trains with.

    Attributes:
        ranks: who they are.
        options: of our own reduction; None where an engine reduces.
        bucket_order: rows as their gradients arrived on rank 0 in the first window; None before.
        engine: DDP or FSDP2.
        joint: their windows as one.
    """

    def __init__(
        self, ranks: Ranks, options: ReducerOptions | None, engine: Engine | None = None
    ) -> None:
        self.ranks = ranks
        self.options = options
        self.engine = engine
        self.joint = JointWindows(ranks)
        self.bucket_order: list[int] | None = None
        if engine is not None:
            self.joint.reduction = engine

    def __deepcopy__(self, memo: dict[int, Any]) -> Processes:
        """A copy of a wrapper trains with the same processes, in windows of its own."""
        return Processes(self.ranks, self.options)

    def refuse_copy(self) -> None:
        """Refuses a copy of what only one wrapper can have.

        Raises:
            RuntimeError: shares of the states, or an engine.
        """
        is_shared_out = self.options is not None and self.options.shard_states
        if is_shared_out or self.engine is not None:
            has = "a share of the states" if is_shared_out else "DDP or FSDP2"
            raise RuntimeError(
                f"ClockedOptimizer: a wrapper must not be copied or pickled where it has {has}; "
                "save state_dict() on every rank"
            )

    @property
    def reduced_by(self) -> str:
        """Who adds gradients over processes: "us" or "engine"."""
        return "us" if self.engine is None else "engine"

    @property
    def shared_options(self) -> ReducerOptions | None:
        """The options, without the group, of which each process has its own object."""
        return None if self.options is None else replace(self.options, process_group=None)

    @property
    def place(self) -> list[int]:
        """Rank and size, for what only this process can load."""
        return [self.ranks.rank, self.ranks.size]

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to add and to round as this one does."""
        unit, order = self.joint.next_unit, self.bucket_order
        return {"place": self.place, "unit": unit, "bucket_order": order}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Takes over what a run of several processes has saved."""
        if state is not None:
            self.joint.next_unit = float(state["unit"])
            order = state["bucket_order"]
            self.bucket_order = None if order is None else [int(row) for row in order]

    def watch(
        self, accumulator: Accumulator, groups: Iterable[dict[str, Any]], names: Sequence[str]
    ) -> None:
        """Tells the engine of the parameters, and the accumulator of the engine."""
        if self.engine is not None:
            self.engine.bind([p for group in groups for p in group["params"]], names)
            accumulator.is_replaced = True

    def refuse_hidden(self) -> None:
        """Refuses to save an open window that lies inside an engine.

        Raises:
            RuntimeError: it does.
        """
        if self.engine is not None and self.engine.hides_gradients:
            raise RuntimeError(
                "ClockedOptimizer.state_dict: under FSDP2 a state must be saved between two "
                "windows, got an open one, whose gradients FSDP2 keeps; save after an update"
            )

    def explain(self, error: BaseException, opt: ClockedOptimizer) -> None:
        """Raises the error that names the missing rank, where `error` is a collective's."""
        if isinstance(error, RuntimeError) and _is_collective(error):
            raise self.ranks.failure(self.joint.describe(opt), error) from error

    def across(self, opt: ClockedOptimizer) -> Across | None:
        """How the norm is taken across ranks; None where each of them holds every gradient."""
        if opt._locals is not None:
            counted = opt._locals.counted
        elif opt._pass.shards is not None:
            counted = [True] * len(opt._pass.moved_rows.params)
        else:
            return None
        return Across(self.ranks, counted, self.joint.describe(opt))

    def add_samples(self, opt: ClockedOptimizer, mine: NoiseSample | None) -> NoiseSample | None:
        """What all ranks' micro steps say about the noise; None where one of them says nothing."""
        numbers = [math.nan, 0.0] if mine is None else [mine.weighted_squares, mine.num_micro]
        told = self.ranks.gather(numbers, self.joint.describe(opt))
        squares, num_micro = (sum(numbers) for numbers in zip(*told, strict=True))
        if mine is None or math.isnan(squares):
            return None
        return replace(mine, weighted_squares=squares, num_micro=int(num_micro))

    def make_reduction(self, rows: ParameterRows) -> BucketReduction | None:
        """Our own reduction of these rows, which takes the place of an earlier one."""
        if self.options is None:
            return None
        scatters = self.options.shard_states
        order = self.bucket_order
        if order is not None and len(order) != len(rows.params):
            order = self.bucket_order = None  # a group was added
        buckets = Buckets(
            rows.params,
            [rows.sum_dtype(row) for row in rows.every_row],
            bucket_bytes=self.options.bucket_bytes,
            num_ranks=self.ranks.size if scatters else 1,
            order=order,
        )
        reduction = BucketReduction(buckets, self.ranks, scatters=scatters)
        reduction.overlaps = order is not None
        self.joint.reduction = reduction
        return reduction

    def learn_order(self, opt: ClockedOptimizer, what: str) -> None:
        """At the end of the first window: lays the buckets out as gradients arrive.

        Rows without a gradient come last. With shared states that were loaded, which are cut by
        the buckets as they are, these stay.
        """
        if self.options is None or self.bucket_order is not None:
            return
        rows, before = opt._pass.rows, opt._pass.accumulator
        arrived = list(before.caught.order)
        seen = set(arrived)
        order = arrived + [row for row in reversed(rows.every_row) if row not in seen]
        as_it_is = list(reversed(rows.every_row))
        if opt._pass.shards is not None and (
            opt._pass.shards.has_states() or opt.clock.update_step
        ):
            order = as_it_is
        told = self.ranks.broadcast([len(arrived), *order], what)
        if told[0] == 0:
            return  # rank 0 had no items; the next window may tell
        self.bucket_order = told[1:]
        if self.bucket_order == as_it_is:
            assert before.reduction is not None
            before.reduction.overlaps = True
            return
        norms = None if before.norms is None else before.norms.state_dict(before.grads())
        opt._build_pass()
        if opt._pass.accumulator.norms is not None:
            opt._pass.accumulator.norms.load_state_dict(norms)


def join_processes(
    model: torch.nn.Module | None, process_group: Any, optimizers: Sequence[Optimizer]
) -> Processes | None:
    """The processes of a wrapper; None where it is alone, or nobody told it of others.

    Raises:
        TypeError, ValueError, RuntimeError: as `check_process_group`; an optimizer cannot go with
            the options.
    """
    options = check_process_group(process_group)
    engine = _find_engine(model, optimizers)
    if engine is not None and options is not None:
        raise ValueError(
            "ClockedOptimizer: process_group must be None where DDP or FSDP2 reduces, got a group; "
            "pass the bare model, or leave process_group out"
        )
    if engine is None and options is None:
        return None
    for inner in optimizers:
        if isinstance(inner, LBFGS):
            raise ValueError(
                "ClockedOptimizer: process_group must be None with LBFGS, and model no DDP or "
                "FSDP2, got several processes; it looks at each one's own loss, and would evaluate "
                "closures a different number of times"
            )
    if engine is not None:
        return Processes(engine.ranks, None, engine)
    assert options is not None
    if options.shard_states:
        refuse_unsharded(optimizers)
    ranks = Ranks(options.process_group, options.timeout)
    return Processes(ranks, options) if ranks.size > 1 else None


def data_parallel_size(processes: Processes | None) -> int:
    """How many processes read different data, as the plan counts them."""
    if processes is not None:
        engine = processes.engine
        known = None if engine is None else engine.num_averaged
        return processes.ranks.size if known is None else known
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return 1


def _find_engine(model: torch.nn.Module | None, optimizers: Sequence[Optimizer]) -> Engine | None:
    """Who reduces the gradients of this model inside backward.

    Raises:
        TypeError, ValueError: it is wrapped in an engine that is not supported.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    modules = [] if model is None else list(model.modules())
    for module in modules:
        if type(module).__name__ == "FullyShardedDataParallel":
            raise TypeError(
                "ClockedOptimizer: model must be wrapped by fully_shard (FSDP2) or DDP, got "
                "FullyShardedDataParallel; use torch.distributed.fsdp.fully_shard"
            )
    ddp = [module for module in modules if isinstance(module, DistributedDataParallel)]
    if any(module.process_group is not ddp[0].process_group for module in ddp):
        raise ValueError(
            "ClockedOptimizer: every DDP module of the model must have the same process group, got "
            "several; give each group a wrapper of its own"
        )
    if ddp:
        return DdpReduction(ddp, Ranks(ddp[0].process_group))
    sharded = fsdp_modules(model)
    if sharded or has_dtensors(optimizers):
        return FsdpReduction(sharded, Ranks(None))
    return None


def _is_collective(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or bool(_COLLECTIVE.search(str(error)))
