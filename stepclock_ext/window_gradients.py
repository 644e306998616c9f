"""The gradients at the end of a window, in a state that ops can walk."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["WindowGradients"]


@dataclass(frozen=True, eq=False)
class WindowGradients:
    """The gradients at the end of a window, in a state that ops can walk.

    Attributes:
        grads: one a row; None where the parameter took no part.
        walked: rows for the fast backend.
        odd: rows that plain PyTorch has to work on (sparse gradients, other devices or dtypes).
    """

    grads: list[Tensor | None]
    walked: tuple[int, ...]
    odd: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        """No parameter holds a gradient."""
        return not self.walked and not self.odd

    @property
    def is_complete(self) -> bool:
        """Every parameter holds a gradient."""
        return len(self.walked) + len(self.odd) == len(self.grads)

    def of(self, rows: tuple[int, ...]) -> list[Tensor]:
        """The gradients of `rows`, all of which are present."""
        if len(rows) == len(self.grads):
            return self.grads  # type: ignore[return-value]
        return [grad for row in rows if (grad := self.grads[row]) is not None]
