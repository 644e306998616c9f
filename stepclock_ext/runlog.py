"""The run log: one JSON line per update, appended as it happens and readable back."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from .step_info import StepInfo

__all__ = ["RunLog", "read_run_log"]

# JSON has no word for these. float() of Python and Number() of JavaScript read the strings.
_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class RunLog:
    """Appends one line for each update or skip; a reader sees it at once.

    A line is a JSON object: the fields of `StepInfo`, then what the caller adds. Numbers that JSON
    cannot hold, as the norm of a skipped update, are the strings "NaN", "Infinity", "-Infinity".

    Args:
        path: the file; it is made, or continued. A last line that a crash cut short is removed.

    Raises:
        OSError: the file cannot be opened for writing.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "run.jsonl"
        >>> info = StepInfo(
        ...     updated=True, skipped=False, loss=2.5, grad_norm=1.5, clipped_norm=1.0, lr=(1e-3,),
        ...     loss_scale=None, micro_step=8, update_step=1,
        ... )
        >>> with RunLog(path) as log:
        ...     log.write(info, tokens=2048)
        >>> (line,) = read_run_log(path)
        >>> line["update_step"], line["loss"], line["tokens"]
        (1, 2.5, 2048)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file = self.path.open("a+b")
        _remove_torn_line(self._file)

    def write(self, info: StepInfo, /, **extra: Any) -> None:
        """Appends a line; a step inside a window leaves none.

        Args:
            info: what `step` returned.
            extra: more for this line: numbers, strings, booleans, None, lists and dicts of them.

        Raises:
            TypeError: a value of `extra` has no JSON form; nothing was written.
            ValueError: a name in `extra` is a field of `StepInfo`, or the log is closed.
        """
        fields = vars(info)
        for name in extra:
            if name in fields:
                raise ValueError(
                    f"RunLog.write: a name must be none of StepInfo's fields, got {name!r}; "
                    "choose another"
                )
        if not (info.updated or info.skipped):
            return
        line = json.dumps({name: _encode(value, name) for name, value in (fields | extra).items()})
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_run_log(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a run log as dicts, oldest first; ``lr`` is a list.

    A last line without its end (being written, or cut short by a crash) is left out.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is no JSON object; the message names it.
    """
    *lines, _ = Path(path).read_bytes().split(b"\n")
    return [_parse(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        values = _decode(json.loads(line))
    except ValueError as error:
        raise ValueError(f"read_run_log: {where} must be JSON, got {line[:60]!r}") from error
    if not isinstance(values, dict):
        raise ValueError(f"read_run_log: {where} must be a JSON object, got {line[:60]!r}")
    return values


def _encode(value: Any, where: str) -> Any:
    """`value` in types that JSON has."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, (list, tuple)):
        return [_encode(item, where) for item in value]
    if isinstance(value, dict):
        return {str(key): _encode(item, str(key)) for key, item in value.items()}
    raise TypeError(
        f"RunLog.write: {where} must be numbers, strings, booleans, None, lists or dicts, got "
        f"{type(value).__name__}; a tensor's .item() or .tolist() gives one"
    )


def _decode(value: Any) -> Any:
    if isinstance(value, str):
        return _NONFINITE.get(value, value)
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if isinstance(value, dict):
        return {key: _decode(item) for key, item in value.items()}
    return value


def _remove_torn_line(file: Any) -> None:
    """Cuts `file` behind its last newline, so that the next line starts a line."""
    end = file.seek(0, os.SEEK_END)
    kept, block = end, 1 << 16
    while kept > 0:
        start = max(0, kept - block)
        file.seek(start)
        newline = file.read(kept - start).rfind(b"\n")
        kept = start + newline + 1
        if newline >= 0:
            break
    if kept < end:
        file.truncate(kept)
