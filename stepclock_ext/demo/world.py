"""The processes that run one demo together, as torchrun starts them."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from .settings import WHERE, DemoError, DemoSettings

__all__ = ["ALONE", "OtherProcessError", "World", "joined_world"]

T = TypeVar("T")

LAUNCHED = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
# A window takes a second. A process that is gone is noticed at once, one that is stuck after this.
TIMEOUT = timedelta(minutes=2)
# torchrun ends all processes once one has ended: so long the others leave the word to the first
# that failed. Saying why takes it milliseconds.
GRACE_SECONDS = 1.0


class OtherProcessError(RuntimeError):
    """Another process failed before this one, and says why."""


@dataclass(frozen=True)
class World:
    """The processes of a demo, seen from one of them.

    Attributes:
        rank: of this process; the first, rank 0, prints, draws and writes files for all.
        size: how many there are.
    """

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for all."""
        return self.rank == 0

    @property
    def plain_name(self) -> str:
        """Of the plain loop beside the clocked one."""
        return "plain PyTorch" if self.size == 1 else "PyTorch DDP"

    def share(self, window: Sequence[T]) -> Sequence[T]:
        """This process's micro batches of a window.

        >>> World(rank=1, size=2).share("abcdef")
        'bdf'
        """
        return window[self.rank :: self.size]

    def add_up_(self, total: Tensor) -> None:
        """Adds the totals of all processes."""
        if self.size > 1:
            dist.all_reduce(total)

    def check_share(self, accumulation_steps: int) -> None:
        """Sees to it that every process has as many micro batches of a window.

        Raises:
            DemoError: it has not.
        """
        if accumulation_steps % self.size:
            fitting = [n for n in range(1, accumulation_steps + 1) if accumulation_steps % n == 0]
            raise DemoError(
                f"{WHERE}: the number of processes must divide the {accumulation_steps} micro "
                f"batches of a window, got {self.size}; start {', '.join(map(str, fitting))}"
            )

    def check_same(self, settings: DemoSettings, text: Tensor) -> None:
        """Sees to it that all processes draw the same windows and train alike.

        Raises:
            DemoError: they do not.
        """
        if self.size == 1:
            return
        options = zlib.crc32(repr((settings.seed, settings.recipe, settings.shape)).encode())
        by_place = (text * torch.arange(1, len(text) + 1)).sum()
        mine = torch.tensor([options, len(text), int(by_place)])
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine)
        others = [rank for rank in range(self.size) if not found[rank].equal(found[0])]
        if others:
            raise DemoError(
                f"{WHERE}: options and text must be the same in all processes, got others in rank "
                f"{', '.join(map(str, others))} than in rank 0; start all nodes with one command, "
                "and pass a file that all have as --text"
            )


ALONE = World()


@contextmanager
def joined_world() -> Iterator[World]:
    """The world that a launcher describes in the environment; without one, `ALONE`.

    Of an error that stops several processes, the first that meets one raises its own.

    Raises:
        OtherProcessError: another one does.
    """
    if not os.environ.keys() >= LAUNCHED or os.environ["WORLD_SIZE"] == "1":
        yield ALONE
        return
    dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        yield World(dist.get_rank(), dist.get_world_size())
    except BaseException as error:
        if not _is_first_to_fail():
            time.sleep(GRACE_SECONDS)
            raise OtherProcessError(f"{WHERE}: another process failed") from error
        raise
    finally:
        dist.destroy_process_group()


def _is_first_to_fail() -> bool:
    """Whether no other process has asked this before; also where that cannot be found out."""
    store, mine = dist.distributed_c10d._get_default_store(), str(dist.get_rank())
    try:
        first: bytes = store.compare_set("stepclock demo/failed", "", mine)
    except RuntimeError:  # the launcher, which keeps the store, is gone
        return True
    return first.decode() == mine
