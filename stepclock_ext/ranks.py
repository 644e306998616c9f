"""The processes that train together: what they tell each other, and which of them is missing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from .collectives import all_gather_single

__all__ = ["Ranks"]

T = TypeVar("T")

# After a failure each rank leaves its name in the store and looks for those of the others so long.
_ROLL_CALL_SECONDS = 2.0
_DEFAULT_TIMEOUT = timedelta(minutes=30)  # torch's own


class Ranks:
    """The processes of a group, seen from one of them.

    Numbers and sums travel in groups of their own, with this timeout, so that they meet no
    collective of anybody else; numbers over gloo, which waits for no device, and fails in words.
    The wrappers of a process share them. Making the first is collective.

    Args:
        group: whose processes; None for all there are.
        timeout: what a missing process is waited for; None is the group's own.

    Attributes:
        group: as given.
        control: for numbers and objects.
        sums: for gradients and parameters.
        rank: of this process in the group.
        size: of the group.
        timeout: as in force.
    """

    def __init__(self, group: ProcessGroup | None, timeout: timedelta | None = None) -> None:
        found = dist.group.WORLD if group is None else group
        assert found is not None  # torch.distributed is initialised
        self.group: ProcessGroup = found
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        self.timeout = _timeout_of(self.group) if timeout is None else timeout
        self.control, self.sums = _own_groups(self.group, self.timeout)
        self._device = _device_of(self.control)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        """A copy of a wrapper talks to the same processes."""
        return self

    def __reduce__(self) -> Any:
        raise RuntimeError(
            "ClockedOptimizer: a wrapper of several processes must not be pickled, its group "
            "belongs to this one; save state_dict() on every rank"
        )

    def gather(self, numbers: Sequence[float], what: str) -> list[list[float]]:
        """What every rank said, in rank order; the same on all of them, to the bit.

        Args:
            numbers: as many on every rank.
            what: "the end of update 3", for the message.

        Raises:
            RuntimeError: a rank did not come in time; the message names it.
        """
        mine = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        heard = mine.new_empty(self.size * len(numbers))
        self.call(lambda: all_gather_single(heard, mine, group=self.control), what)
        told: list[list[float]] = heard.view(self.size, -1).tolist()
        return told

    def broadcast(self, numbers: Sequence[int], what: str) -> list[int]:
        """What rank 0 says. Errors as for `gather`."""
        sent = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        first = dist.get_global_rank(self.group, 0)
        self.call(lambda: dist.broadcast(sent, first, group=self.control), what)
        told: list[int] = sent.tolist()
        return told

    def any(self, flags: Sequence[bool], what: str) -> list[bool]:
        """Which flags are set on any rank. Errors as for `gather`."""
        mine = torch.tensor(flags, dtype=torch.uint8, device=self._device)
        self.call(lambda: dist.all_reduce(mine, dist.ReduceOp.MAX, group=self.control), what)
        return [bool(flag) for flag in mine.tolist()]

    def call(self, collective: Callable[[], T], what: str) -> T:
        """Runs a collective, or waits for one; where it fails, says who is missing.

        Raises:
            RuntimeError: as described.
        """
        try:
            return collective()
        except RuntimeError as e:
            raise self.failure(what, e) from e

    def failure(self, what: str, error: BaseException) -> RuntimeError:
        """The error for a collective that did not succeed on this rank."""
        reason = str(error).strip().splitlines()[-1:] or ["no reason given"]
        return RuntimeError(
            f"ClockedOptimizer: all {self.size} ranks must reach {what} within "
            f"{self.timeout.total_seconds():g} s, got no answer on rank {self.rank}: "
            f"{self._describe_others(what)} ({reason[0]}); look at the log of that rank, and "
            "restart from the last checkpoint"
        )

    def _describe_others(self, what: str) -> str:
        """Ranks that have not failed as this one has, or have somewhere else."""
        found = self._call_the_roll(what)
        if found is None:
            return "another rank stopped, or was late"
        missing = [str(r) for r in range(self.size) if r not in found]
        elsewhere = [f"rank {r} waits at {place}" for r, place in found.items() if place != what]
        if missing:
            said = f"rank{'s' * (len(missing) > 1)} {', '.join(missing)} did not come"
            return "; ".join([said, *elsewhere])
        return "; ".join(elsewhere) or "every rank came, and one of them found an error"

    def _call_the_roll(self, what: str) -> dict[int, str] | None:
        """Where each rank failed that has; None where it cannot be found out."""
        found: dict[int, str] = {}
        try:
            store = dist.distributed_c10d._get_default_store()
            run = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the store outlives a run
            names = [f"stepclock/{run}/{self.control.group_name}/{r}" for r in range(self.size)]
            store.set(names[self.rank], what)
            end = time.monotonic() + min(_ROLL_CALL_SECONDS, self.timeout.total_seconds())
            while len(found) < self.size and time.monotonic() < end:
                for r in range(self.size):
                    if r not in found and store.check([names[r]]):
                        found[r] = store.get(names[r]).decode()
                time.sleep(0.02)
        except Exception:  # the store lives in a process, which may be the one that is gone
            return None
        return found


_made: dict[tuple[str, timedelta], tuple[ProcessGroup, ProcessGroup]] = {}


def _own_groups(group: ProcessGroup, timeout: timedelta) -> tuple[ProcessGroup, ProcessGroup]:
    """The groups for numbers and for sums, made once for a group and a timeout."""
    alive = dist.distributed_c10d._world.pg_map
    key = (group.group_name, timeout)
    found = _made.get(key)
    if found is None or any(own not in alive for own in found):
        found = _made[key] = (
            _new_group(group, timeout, "gloo" if dist.is_gloo_available() else None),
            _new_group(group, timeout, None),
        )
    return found


def _new_group(group: ProcessGroup, timeout: timedelta, backend: str | None) -> ProcessGroup:
    members = dist.get_process_group_ranks(group)
    made = dist.new_group(
        members,
        timeout=timeout,
        backend=backend or str(dist.get_backend_config(group)),
        use_local_synchronization=len(members) < dist.get_world_size(),
    )
    assert isinstance(made, ProcessGroup)
    return made


def _device_of(group: ProcessGroup) -> torch.device:
    """The CPU where the group has a backend for it."""
    kinds = [device.type for device in group._device_types]
    if "cpu" in kinds or not kinds:
        return torch.device("cpu")
    index = torch.get_device_module(kinds[0]).current_device()
    return torch.device(kinds[0], index)


def _timeout_of(group: ProcessGroup) -> timedelta:
    try:
        options: Any = group._get_backend(_device_of(group)).options
        found = options._timeout
    except (AttributeError, RuntimeError):
        return _DEFAULT_TIMEOUT
    return found if isinstance(found, timedelta) else _DEFAULT_TIMEOUT
