"""The files of checkpoints: their names, written whole or not at all, read with suspicion.

A checkpoint of parameters that are spread over processes is a folder, of the same name without the
".pt": `SKELETON` in it is such a file too, and other files hold the tensors that it leaves out.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
import re
import shutil
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

import torch

__all__ = [
    "SKELETON",
    "UNREADABLE",
    "appearing_folder",
    "file_name",
    "is_folder",
    "list_checkpoints",
    "publish_folder",
    "read",
    "remove_oldest",
    "unreadable",
    "write",
    "write_file",
]

FORMAT = "stepclock checkpoint"
VERSION = 1
SKELETON = "skeleton.pt"
_NAME = re.compile(r"ckpt_step(\d+)(?:_[A-Za-z0-9_.]+-[^/]+)?(?:\.pt)?")
_METRIC = re.compile(r"[A-Za-z0-9_.]+")
_TEMPORARY = ".ckpt_step*.tmp"
# What torch.load raises on files that are not what they seem.
UNREADABLE = (
    AttributeError,
    EOFError,
    IndexError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)


def file_name(update: int, metric: tuple[str, float] | None) -> str:
    """The name of a checkpoint after `update` updates.

    Example:
        >>> file_name(1200, None), file_name(1200, ("f1", 0.86312))
        ('ckpt_step1200.pt', 'ckpt_step1200_f1-0.8631.pt')
    """
    if metric is None:
        return f"ckpt_step{update}.pt"
    if not isinstance(metric, (tuple, list)) or len(metric) != 2:
        raise TypeError(f"save_checkpoint: metric must be a name and a value, got {metric!r}")
    name, value = metric
    if not isinstance(name, str) or not _METRIC.fullmatch(name):
        raise ValueError(
            f"save_checkpoint: a metric's name must be of letters, digits, '_' and '.', got "
            f"{name!r}; rename it"
        )
    try:
        return f"ckpt_step{update}_{name}-{float(value):.4g}.pt"
    except (TypeError, ValueError) as e:
        raise ValueError(
            f"save_checkpoint: the value of a metric must be a number, got {value!r}; pass a float"
        ) from e


def is_folder(path: Path) -> bool:
    """Whether `path` is a checkpoint that is a folder."""
    return (path / SKELETON).is_file()


def list_checkpoints(folder: Path) -> list[tuple[int, int, Path]]:
    """Our own checkpoints in `folder` as (update, time of writing in ns, path), in this order."""
    found = []
    for path in folder.glob("ckpt_step*"):
        match = _NAME.fullmatch(path.name)
        if match and (path.is_file() if path.suffix == ".pt" else is_folder(path)):
            written = path if path.is_file() else path / SKELETON
            found.append((int(match[1]), written.stat().st_mtime_ns, path))
    return sorted(found)


def remove_oldest(folder: Path, *, limit: int, keep: Path) -> None:
    """Leaves the `limit` checkpoints that were written last, `keep` among them."""
    by_age = sorted((time, update, path) for update, time, path in list_checkpoints(folder))
    others = [path for _, _, path in by_age if path != keep]
    for path in others[: max(0, len(others) - (limit - 1))]:
        if path.is_dir():
            _remove_folder(path)
        path.unlink(missing_ok=True)


def write(path: Path, content: dict[str, Any]) -> None:
    """Makes `path` a file of `content`; until it is whole and on the disk, nothing changes there.

    Raises:
        OSError: it cannot be written; a file that was at `path` is still there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, content)
    except OSError as e:
        raise OSError(
            e.errno,
            f"save_checkpoint: {path} must be a file that can be written, got {e.strerror}; make "
            "room, or pass another folder",
        ) from e
    _remove_leftovers(path.parent)


def write_file(path: Path, content: dict[str, Any]) -> None:
    """As `write`, into a folder that is there, with the system's own errors."""
    head = {
        "format": FORMAT,
        "version": VERSION,
        "has_checksums": torch.serialization.get_crc32_options(),
    }
    with _replacing(path) as file:
        _save({**head, **content}, file)


def read(path: Path) -> dict[str, Any]:
    """What `write` wrote, of a folder its skeleton; tensors on the CPU.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is cut short, damaged, of another program or of another version.
    """
    file = path / SKELETON if path.is_dir() else path
    try:
        with zipfile.ZipFile(file) as archive, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's words for files of other programs
            content = torch.load(file, map_location="cpu", weights_only=True)
            _check_head(path, content)
            damaged = archive.testzip() if content["has_checksums"] else None
    except zipfile.BadZipFile as e:
        raise unreadable(path, "one that is cut short or of another program") from e
    except _HeadError as e:
        raise unreadable(path, str(e)) from e
    except UNREADABLE as e:
        raise unreadable(path, f"{type(e).__name__}: {str(e).splitlines()[0][:100]}") from e
    if damaged is not None:
        raise unreadable(path, f"one whose part {damaged!r} has other bytes than were written")
    return content  # type: ignore[no-any-return]


class _HeadError(Exception):
    """What a file is instead of a checkpoint of this version."""


def _check_head(path: Path, content: Any) -> None:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        keys = (
            sorted(map(str, content))[:5] if isinstance(content, dict) else type(content).__name__
        )
        raise _HeadError(f"one of another program, with {keys}")
    version = content.get("version")
    if version != VERSION:
        age = "a later" if isinstance(version, int) and version > VERSION else "an older"
        raise _HeadError(f"one of {age} release (version {version!r}, this one reads {VERSION})")
    missing = {"has_checksums", "model", "optimizer", "names", "random", "extra"} - content.keys()
    if missing:
        raise _HeadError(f"one without {', '.join(sorted(missing))}")


def unreadable(path: Path, what: str) -> ValueError:
    return ValueError(
        f"load_checkpoint: {path} must be a whole checkpoint of save_checkpoint, got {what}; pass "
        "another one"
    )


def _save(content: dict[str, Any], file: IO[bytes]) -> None:
    """torch.save, which makes a RuntimeError of its own of a full disk."""
    try:
        torch.save(content, file)
    except RuntimeError as e:
        if isinstance(e.__context__, OSError):
            raise e.__context__ from None
        raise


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that becomes `path` once it is on the disk. Its lock says that its writer lives."""
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
        _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """A rename is on the disk when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_leftovers(folder: Path) -> None:
    """Removes what killed processes left; what is being written is locked."""
    for path in folder.glob(_TEMPORARY):
        with suppress(OSError), _locked(path):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Says that the writer of a file or folder lives. OSError where another one does."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


# Folders: several processes write into one, and the first of them makes and renames it.


@contextmanager
def appearing_folder(temporary: Path) -> Iterator[None]:
    """A folder to be filled, and published inside; what is then still there goes.

    Raises:
        OSError: it cannot be made.
    """
    temporary.parent.mkdir(parents=True, exist_ok=True)
    temporary.mkdir()
    try:
        with _locked(temporary):
            yield
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _remove_leftovers(temporary.parent)


def publish_folder(temporary: Path, path: Path) -> None:
    """Gives a folder that is whole its name.

    One of that name steps aside first, to a name of a checkpoint, and goes at last: a crash at any
    point leaves one of the two.

    Raises:
        OSError: it cannot be renamed, or something that is no checkpoint has that name.
    """
    if path.exists() and not is_folder(path):
        raise FileExistsError(errno.EEXIST, "something that is no checkpoint")
    _sync_folder(temporary)
    aside = path.with_name(f"{path.name}_replaced-{uuid4().hex}")
    if path.exists():
        path.rename(aside)
    temporary.rename(path)
    _sync_folder(path.parent)
    if aside.exists():
        _remove_folder(aside)


def _remove_folder(path: Path) -> None:
    """A checkpoint that goes does so at once, under its name."""
    hidden = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)
