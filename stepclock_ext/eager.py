"""Keeps torch.compile out of the wrapper: its graph breaks there, and the update runs eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

__all__ = ["run_eagerly"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def run_eagerly(function: _Function) -> _Function:
    """Decorates `function` so that torch.compile traces neither it nor what it calls.

    An update writes through raw addresses and changes Python counters: traced, it would compile
    anew for each learning rate. ``torch.compiler.disable`` loads the compiler when it decorates;
    torch guards its own optimizers with this variant, which waits for the first call.
    """
    disable: Callable[[Callable[..., Any]], Any] = vars(torch)["_disable_dynamo"]
    return cast(_Function, disable(function))
