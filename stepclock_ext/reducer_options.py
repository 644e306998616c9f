"""How a wrapper reduces gradients over a process group by itself."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import distributed as dist

__all__ = ["ReducerOptions", "check_process_group"]

_WHERE = "ReducerOptions"


@dataclass(frozen=True)
class ReducerOptions:
    """What ``process_group=`` may say beside the group.

    Attributes:
        process_group: whose processes train together; None for all there are.
        bucket_cap_mb: MiB of a bucket of window sums. One is reduced while autograd still works on
            the next; large ones use the wire better, small ones begin earlier.
        shard_states: ZeRO-1 (Rajbhandari et al. 2020): sums are reduce-scattered, each process
            updates its share with its share of the optimizer's states and masters, and parameters
            are gathered. Needs AdamW, Adam or SGD.
        broadcast_parameters: begin with the parameters of rank 0; without it, processes that begin
            with others are refused.
        timeout: what a process that is missing is waited for; None is the group's own.

    Raises:
        TypeError, ValueError: a value is outside its range.

    Example:
        >>> ReducerOptions(bucket_cap_mb=0)
        Traceback (most recent call last):
        ...
        ValueError: ReducerOptions: bucket_cap_mb must be positive, got 0; 25 is usual
    """

    process_group: Any = None
    bucket_cap_mb: float = 25.0
    shard_states: bool = False
    broadcast_parameters: bool = False
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        for name in ("shard_states", "broadcast_parameters"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(
                    f"{_WHERE}: {name} must be True or False, got {getattr(self, name)!r}"
                )
        cap = self.bucket_cap_mb
        if isinstance(cap, bool) or not isinstance(cap, (int, float)):
            raise TypeError(f"{_WHERE}: bucket_cap_mb must be a number, got {cap!r}; 25 is usual")
        if not 0 < cap < float("inf"):
            raise ValueError(f"{_WHERE}: bucket_cap_mb must be positive, got {cap}; 25 is usual")
        if self.timeout is not None and not isinstance(self.timeout, timedelta):
            raise TypeError(
                f"{_WHERE}: timeout must be a timedelta, got {self.timeout!r}; pass "
                "timedelta(seconds=...)"
            )
        if self.timeout is not None and self.timeout <= timedelta():
            raise ValueError(f"{_WHERE}: timeout must be positive, got {self.timeout}")

    @property
    def bucket_bytes(self) -> int:
        """Bytes of a full bucket."""
        return max(1, round(self.bucket_cap_mb * 2**20))


def check_process_group(value: Any) -> ReducerOptions | None:
    """The options that ``process_group=`` stands for; None where this wrapper does not reduce.

    Raises:
        TypeError: it is neither a group nor options.
        ValueError: this process is not in the group.
        RuntimeError: torch.distributed is not initialised.
    """
    if value is None:
        return None
    options = value if isinstance(value, ReducerOptions) else ReducerOptions(value)
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "ClockedOptimizer: process_group must come after torch.distributed is initialised; "
            "call torch.distributed.init_process_group() first"
        )
    group = options.process_group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "ClockedOptimizer: process_group must hold this process, got a group without it; build "
            "the wrapper on its members alone"
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "ClockedOptimizer: process_group must be a ProcessGroup, ReducerOptions or None, got "
            f"{group!r}; torch.distributed.group.WORLD holds all processes"
        )
    return options
