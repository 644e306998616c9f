"""The files of a demo: where they lie, and how they are replaced whole."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from .settings import WHERE, DemoError
from .train import ClockedRun

__all__ = ["DemoFiles", "must_write", "prepare_folder", "replacing", "save_checkpoint"]


@dataclass(frozen=True)
class DemoFiles:
    """Paths in the output folder."""

    folder: Path

    @property
    def run_log(self) -> Path:
        """JSON lines, one an update."""
        return self.folder / "run.jsonl"

    @property
    def checkpoint(self) -> Path:
        """Model and optimizer; ``torch.load`` reads it with ``weights_only=True``."""
        return self.folder / "checkpoint.pt"

    @property
    def plot(self) -> Path:
        """PNG."""
        return self.folder / "run.png"


def prepare_folder(folder: Path) -> DemoFiles:
    """Makes the output folder and removes the files of an earlier demo from it.

    Raises:
        DemoError: the folder cannot be made or written.
    """
    files = DemoFiles(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        for path in (files.run_log, files.checkpoint, files.plot):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise DemoError(
            f"{WHERE}: --out must be a folder that can be written, got {folder} "
            f"({error.strerror}); pass another folder"
        ) from error
    return files


@contextmanager
def must_write(path: Path) -> Iterator[None]:
    """Around what writes `path`.

    Raises:
        DemoError: it cannot be written.
    """
    try:
        yield
    except BrokenPipeError:  # the reader of our output is gone; the file is well
        raise
    except OSError as error:
        raise DemoError(
            f"{WHERE}: {path} must be a file that can be written, got {error.strerror}; make room, "
            "or pass another folder as --out"
        ) from error


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that becomes `path` once it is whole and on the disk; on an error, never.

    Raises:
        DemoError: it cannot be written; what was at `path` before is still there.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with must_write(path), temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def save_checkpoint(path: Path, run: ClockedRun) -> None:
    """Writes the model and the optimizer, with its clock, loss scale and schedule.

    Raises:
        DemoError: the file cannot be written.
    """
    state = {"model": run.model.state_dict(), "optimizer": run.opt.state_dict()}
    buffer = io.BytesIO()  # writing to the file itself, torch makes a RuntimeError of a full disk
    torch.save(state, buffer)
    with replacing(path) as file:
        file.write(buffer.getbuffer())
