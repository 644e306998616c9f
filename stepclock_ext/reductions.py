"""Who adds the gradients of several processes, and when."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from .ranks import Ranks

__all__ = ["Engine", "Reduction"]


class Reduction(Protocol):
    """Adds each window's gradients over the ranks, once.

    Attributes:
        is_averaged: what comes out is the mean over ranks; else the sum.
        num_collectives_before: launched by us before this window; ranks could disagree about it.
        num_rounds: reductions of this window that have been launched on this rank.
    """

    is_averaged: bool
    num_collectives_before: int

    @property
    def num_rounds(self) -> int: ...

    @property
    def is_complete(self) -> bool:
        """Every parameter got a gradient on this rank, or nobody has to know."""
        ...

    def complete(self, num_rounds: int, what: str, *, is_complete: bool) -> None:
        """The ranks have met: whatever is not reduced yet is, in as many rounds on all of them.

        Args:
            num_rounds: the most that any rank has launched.
            what: where we are, for messages.
            is_complete: it was so on every rank.

        Raises:
            RuntimeError: a rank did not take part.
        """
        ...


class Engine(ABC):
    """A `Reduction` that runs inside somebody else's backward, and is told when to.

    Args:
        ranks: the processes that agree on windows.

    Attributes:
        is_averaged: True; DDP and FSDP2 take the mean over ranks.
        num_collectives_before: 0; an engine counts its own.
        ranks: as given.
        rest: parameters that it does not know, whose gradients it averages when the ranks meet.
    """

    is_averaged = True
    num_collectives_before = 0

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.rest: list[Tensor] = []
        self._is_reduced = False

    @property
    def num_rounds(self) -> int:
        """1 where this window has been reduced."""
        return int(self._is_reduced)

    @property
    def is_complete(self) -> bool:
        """An engine sees to parameters without a gradient."""
        return True

    @property
    @abstractmethod
    def num_averaged(self) -> int | None:
        """Processes that read different data; None where that is not known."""

    @property
    @abstractmethod
    def reduces_now(self) -> bool:
        """The backward of the micro step that runs talks to other ranks."""

    @property
    @abstractmethod
    def hides_gradients(self) -> bool:
        """Gradients of the open window lie where a checkpoint does not see them."""

    @abstractmethod
    def bind(self, params: Sequence[Tensor], names: Sequence[str]) -> None:
        """The parameters of the wrapper, one a row."""

    @abstractmethod
    def expect(self, *, is_last: bool) -> None:
        """Before the forward of a micro step: whether it is the last of its window."""

    @abstractmethod
    def end_micro_step(self) -> None:
        """After the backward of a micro step."""

    @abstractmethod
    def backward_nothing(self, loss: Tensor) -> None:
        """A micro step without items, where others have some."""

    @abstractmethod
    def complete(self, num_rounds: int, what: str, *, is_complete: bool) -> None:
        """As of any `Reduction`."""

    @abstractmethod
    def clear(self) -> None:
        """A new window."""
