"""Errors that carry more than their message."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["NonFiniteGradientError"]


class NonFiniteGradientError(RuntimeError):
    """Gradients were not finite, and the caller asked not to go on in silence.

    Attributes:
        parameters: names of the parameters concerned, or ``"group 0, parameter 3"`` where no name
            is known.
    """

    def __init__(self, message: str, parameters: Sequence[str]) -> None:
        super().__init__(message)
        self.parameters = list(parameters)

    def __reduce__(self) -> tuple[type, tuple[str, list[str]]]:
        return type(self), (str(self), self.parameters)
