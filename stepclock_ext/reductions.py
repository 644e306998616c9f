"""Who adds the gradients of several processes, and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from .ranks import Ranks

__all__ = ["Engine", "Reduction"]


class Reduction(Protocol):
    """Adds each window's gradients over the ranks, once.

    Attributes:
        is_averaged: what comes out is the mean over ranks; else the sum.
        overlaps: it runs during backward.
        num_rounds: reductions of this window that have been launched on this rank.
    """

    is_averaged: bool
    overlaps: bool

    @property
    def num_collectives_before(self) -> int:
        """Launched by us before this window, where ranks could disagree about it."""
        ...

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


class Engine(Reduction, Protocol):
    """A reduction that runs inside somebody else's backward, and is told when to.

    Attributes:
        ranks: the processes that agree on windows.
        rest: parameters that it does not know, whose gradients it averages when the ranks meet.
    """

    ranks: Ranks
    rest: list[Tensor]

    @property
    def num_averaged(self) -> int | None:
        """Processes that read different data; None where that is not known."""
        ...

    @property
    def reduces_now(self) -> bool:
        """The backward of the micro step that runs talks to other ranks."""
        ...

    @property
    def hides_gradients(self) -> bool:
        """Gradients of the open window lie where a checkpoint does not see them."""
        ...

    def bind(self, params: Sequence[Tensor], names: Sequence[str]) -> None:
        """The parameters of the wrapper, one a row."""
        ...

    def expect(self, *, is_last: bool) -> None:
        """Before the forward of a micro step: whether it is the last of its window."""
        ...

    def end_micro_step(self) -> None:
        """After the backward of a micro step."""
        ...

    def backward_nothing(self, loss: Tensor) -> None:
        """A micro step without items, where others have some."""
        ...

    def clear(self) -> None:
        """A new window."""
        ...
