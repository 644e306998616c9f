"""What the user chose for a demo, and the error that a wrong choice raises."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import stepclock_ext

from .model import ModelShape
from .recipe import Recipe

__all__ = ["WHERE", "DemoError", "DemoSettings"]

WHERE = "stepclock demo"


class DemoError(ValueError):
    """A choice that cannot be followed; its message is one line for the user."""


@dataclass(frozen=True)
class DemoSettings:
    """One demo.

    Attributes:
        out: folder of the files; made if need be.
        text: what to train on; None for the sources of Python's standard library.
        seed: of the initial weights and of the order of the text.
        backend: a name from ``stepclock_ext.backends()``; "auto" becomes the one it stands for.
        recipe: how both runs train.
        shape: the model's sizes.

    Raises:
        DemoError: a value is outside its range, or the backend cannot be used.
    """

    out: Path = Path("stepclock-demo")
    text: Path | None = None
    seed: int = 0
    backend: str = "auto"
    recipe: Recipe = field(default_factory=Recipe)
    shape: ModelShape = field(default_factory=ModelShape)

    def __post_init__(self) -> None:
        updates = self.recipe.updates
        if updates < 1:
            raise DemoError(
                f"{WHERE}: --updates must be 1 or more, got {updates}; {Recipe.updates} is usual"
            )
        if not 0 <= self.seed < 2**63:
            raise DemoError(
                f"{WHERE}: --seed must be from 0 to 2**63 - 1, got {self.seed}; 0 is usual"
            )
        object.__setattr__(self, "backend", _usable_backend(self.backend))


def _usable_backend(name: str) -> str:
    """`name`, checked; for "auto" the fastest that takes CPU tensors."""
    statuses = stepclock_ext.backends()
    if name == "auto":
        return "cpu" if statuses["cpu"].available else "reference"
    if name not in statuses:
        raise DemoError(
            f"{WHERE}: --backend must be one of {', '.join(('auto', *statuses))}, got {name!r}; "
            "`stepclock doctor` says which can be used"
        )
    if not statuses[name].available:
        raise DemoError(
            f"{WHERE}: --backend must be one that can be used here, got {name!r} "
            f"({statuses[name].reason}); pass auto to fall back"
        )
    return name
