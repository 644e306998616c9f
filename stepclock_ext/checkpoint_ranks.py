"""Steps of saving and loading that every rank takes: where one fails, all of them stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import uuid4
from zlib import crc32

import torch.distributed as dist

from .joint_windows import NUM_REPORTED
from .ranks import Ranks

__all__ = ["JointSteps"]

T = TypeVar("T")

# As many numbers as ranks exchange at the end of a window, with an update that no window has: a
# rank that saves and one that goes on training understand each other, and both refuse.
_MARK = -1.0
_TOKENS = 2**48  # fp64 holds them exactly
# What an error of another rank becomes here; the first that it is an instance of.
_KINDS: tuple[type[Exception], ...] = (FileNotFoundError, OSError, TypeError, ValueError)


@dataclass(frozen=True)
class JointSteps:
    """The ranks that save or load together; one process takes the same steps alone.

    Attributes:
        where: the function, for messages.
        ranks: None for one process.
    """

    where: str
    ranks: Ranks | None

    @property
    def rank(self) -> int:
        return 0 if self.ranks is None else self.ranks.rank

    @property
    def size(self) -> int:
        return 1 if self.ranks is None else self.ranks.size

    def take(self, what: str, step: Callable[[], T]) -> T:
        """Runs `step`, and waits for the other ranks to have run theirs.

        Raises:
            Exception: what `step` raised here, else what it raised on the first rank where it did.
            RuntimeError: a rank did not come, or is somewhere else.
        """
        if self.ranks is None:
            return step()
        error: Exception | None = None
        try:
            result = step()
        except Exception as e:
            error = e
        failed = [told[0] for told in self._exchange(what, [float(error is not None)])]
        if any(failed):
            raise self._first(what, error, failed) from error
        return result

    def take_first(self, what: str, step: Callable[[], T]) -> T | None:
        """As `take`, where rank 0 alone has something to do."""
        return self.take(what, lambda: step() if self.rank == 0 else None)

    def agree_on(self, name: str) -> str:
        """Makes sure that every rank means the checkpoint of this name.

        Returns:
            A word that no other save has, the same on all ranks.

        Raises:
            ValueError: ranks mean different ones.
        """
        token = uuid4().int % _TOKENS  # draws from no generator of the user's
        if self.ranks is None:
            return f"{token:x}"
        told = self._exchange(f"{self.where} of {name}", [float(crc32(name.encode())), token])
        others = [r for r, (code, _) in enumerate(told) if code != told[self.rank][0]]
        if others:
            raise ValueError(
                f"{self.where}: every rank must mean the same checkpoint, got {name} on rank "
                f"{self.rank} and another one on rank {others[0]}; give all of them the same path, "
                "and a metric that is reduced over ranks"
            )
        return f"{int(told[0][1]):x}"

    def gather(self, value: Any, what: str) -> list[Any]:
        """On rank 0 what every rank has, in rank order; elsewhere a list of this rank's alone."""
        if self.ranks is None or self.size == 1:
            return [value]
        group, found = self.ranks.control, [None] * self.size if self.rank == 0 else None
        first = dist.get_global_rank(group, 0)
        self.ranks.call(lambda: dist.gather_object(value, found, dst=first, group=group), what)
        return [value] if found is None else found

    def _exchange(self, what: str, numbers: list[float]) -> list[list[float]]:
        assert self.ranks is not None
        head = [_MARK] * 3
        rest = [0.0] * (NUM_REPORTED - len(head) - len(numbers))
        told = self.ranks.gather([*head, *numbers, *rest], what)
        elsewhere = [str(r) for r, heard in enumerate(told) if heard[:3] != head]
        if elsewhere:
            raise RuntimeError(
                f"{self.where}: every rank must call it at the same place, got rank "
                f"{', '.join(elsewhere)} at the end of a window; call it on all of them, not under "
                "'if rank == 0'"
            )
        return [heard[3 : 3 + len(numbers)] for heard in told]

    def _first(self, what: str, error: Exception | None, failed: list[float]) -> Exception:
        """This rank's own error, or that of the first rank that has one."""
        mine = None if error is None else (_kind(error), str(error))
        told: list[Any] = [None] * self.size
        ranks = self.ranks
        assert ranks is not None
        ranks.call(lambda: dist.all_gather_object(told, mine, group=ranks.control), what)
        if error is not None:
            return error
        rank = failed.index(1.0)
        kind, text = told[rank]
        made = next((k for k in _KINDS if k.__name__ == kind), RuntimeError)
        return made(f"{text} (on rank {rank})")


def _kind(error: Exception) -> str:
    return next((kind.__name__ for kind in _KINDS if isinstance(error, kind)), "RuntimeError")
