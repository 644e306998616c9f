"""Where a run goes on that was loaded from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from .random_state import RandomState

__all__ = ["Resume"]

T = TypeVar("T")


@dataclass(frozen=True)
class Resume:
    """Where a loaded run goes on.

    Attributes:
        path: the file or folder.
        epoch: epochs ended.
        micro_steps_to_skip: position in the data of epoch `epoch`, counted from its beginning.
        extra: as given to `save_checkpoint`.
    """

    path: Path
    epoch: int
    micro_steps_to_skip: int
    extra: Any = None
    _random: RandomState | None = field(default=None, repr=False, compare=False)

    def remaining(self, loader: Iterable[T], *, epoch: int) -> Iterator[T]:
        """The micro batches that epoch `epoch` still has; in a later one than `self.epoch`, all.

        What is skipped is loaded and dropped. Random numbers that this takes are given back: they
        continue as they were at the save. The loader must give the epoch's batches in the same
        order again, so shuffle with a generator that is seeded for each epoch.

        Raises:
            ValueError: `epoch` is over, or the loader ends before the position.

        Example:
            >>> resume = Resume(Path("ckpt_step1.pt"), epoch=0, micro_steps_to_skip=3)
            >>> for epoch in range(resume.epoch, 2):
            ...     print([batch for batch in resume.remaining(range(5), epoch=epoch)])
            [3, 4]
            [0, 1, 2, 3, 4]
        """
        if epoch < self.epoch:
            raise ValueError(
                f"Resume.remaining: epoch must be {self.epoch} or more, got {epoch}; begin with "
                "resume.epoch"
            )
        batches = iter(loader)
        if epoch > self.epoch:
            return batches
        skipped = sum(1 for _ in islice(batches, self.micro_steps_to_skip))
        if skipped < self.micro_steps_to_skip:
            raise ValueError(
                f"Resume.remaining: the loader must have {self.micro_steps_to_skip} batches or "
                f"more, got {skipped}; build it on the data of the saved run"
            )
        if self._random is not None:
            self._random.restore()
        return batches
