"""Errors that carry more than their message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .fence_report import FenceReport

__all__ = ["NonFiniteGradientError", "ScheduleMismatchError"]


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


class ScheduleMismatchError(RuntimeError):
    """A checkpoint was made under another plan, and the caller did not say how to go on.

    Attributes:
        report: what differs, and what it would do to the learning rate.
    """

    def __init__(self, message: str, report: FenceReport) -> None:
        super().__init__(message)
        self.report = report

    def __reduce__(self) -> tuple[type, tuple[str, FenceReport]]:
        return type(self), (str(self), self.report)
