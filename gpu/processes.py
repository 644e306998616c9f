"""A command with a time limit, after which it and all its children are gone."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

__all__ = ["run_command"]

ROOT = Path(__file__).resolve().parents[1]


def run_command(
    command: list[str], seconds: float, variables: dict[str, str] | None = None
) -> tuple[int | None, str]:
    """Runs a command in the root, which finds us, the package and what its tests share.

    Returns:
        Its exit status, None where it took more than `seconds` and was killed; all that it said.
    """
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    child = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment | (variables or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        said, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        said, _ = child.communicate()
        return None, said
    return child.returncode, said
