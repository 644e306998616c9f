"""The demo's text, and micro batches drawn from it."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from .settings import WHERE, DemoError

__all__ = ["Batch", "load_text", "windows"]

Batch = tuple[Tensor, Tensor]

# The top-level modules of Python 3.11's library are 4.7 MB; a demo reads 0.2 MB of it.
MAX_TEXT_BYTES = 4 << 20


def load_text(path: Path | None, *, context: int) -> Tensor:
    """The text to train on, uint8, shape (num_bytes,); at most 4 MiB of it.

    Args:
        path: a file; None for the sources of Python's standard library, ordered by name.
        context: bytes that the model sees at once.

    Raises:
        DemoError: the text cannot be read, or is too short for one sequence and its next byte.
    """
    try:
        content = _standard_library() if path is None else _head_of(path)
    except OSError as error:
        raise DemoError(
            f"{WHERE}: --text must be a readable file, got {error.filename} ({error.strerror}); "
            "pass the path of another"
        ) from error
    if len(content) <= context:
        raise DemoError(
            f"{WHERE}: the text must have more than {context} bytes, got {len(content)} from "
            f"{path or 'the standard library'}; pass a longer file as --text"
        )
    return torch.frombuffer(content, dtype=torch.uint8)


def windows(
    text: Tensor, *, micro_steps: int, sequences: int, context: int, seed: int
) -> Iterator[list[Batch]]:
    """Windows of micro batches without end; the same ones for the same seed.

    Args:
        text: uint8, shape (num_bytes,).
        micro_steps: batches in a window.
        sequences: in a batch, each from a random place.
        context: bytes of a sequence.
        seed: of the places.

    Yields:
        `micro_steps` pairs of inputs and targets (the inputs moved on by one byte), int64, shape
        (sequences, context).
    """
    generator = torch.Generator().manual_seed(seed)
    steps = torch.arange(context + 1)
    num_places = len(text) - context
    while True:
        places = torch.randint(num_places, (micro_steps, sequences, 1), generator=generator)
        taken = text[places + steps].long()
        yield [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in taken]


def _standard_library() -> bytearray:
    content = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        content += path.read_bytes()
    return content[:MAX_TEXT_BYTES]


def _head_of(path: Path) -> bytearray:
    with path.open("rb") as file:
        return bytearray(file.read(MAX_TEXT_BYTES))
