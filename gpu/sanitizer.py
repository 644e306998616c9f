"""compute-sanitizer over the small case of `sanitize.py`."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time

from gpu import sanitize
from gpu.outcomes import FAIL, NO_GPU, NO_TIME, PASS
from gpu.processes import run_command
from gpu.sanitize import DONE
from gpu.setting import Found, Setting
from stepclock_ext import ops

__all__ = ["find_tool", "judge", "run"]

TOOL = "compute-sanitizer"
NOT_FOUND = f"skipped: {TOOL} not found"
ERROR_EXIT = 99


def find_tool() -> str | None:
    """On PATH, in $CUDA_HOME or in /usr/local/cuda."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    places = (None, f"{home}/bin", "/usr/local/cuda/bin")
    return next((found for p in places if (found := shutil.which(TOOL, path=p))), None)


def run(setting: Setting, check: str) -> Found:
    """Runs memcheck or racecheck; without a GPU the small case alone."""
    if not setting.device.is_cuda:
        sanitize.run_small_case(ops.make_backend(setting.backend), sanitize.SIZES[:4])
        return {"outcome": NO_GPU}
    tool = find_tool()
    if tool is None:
        return {"outcome": NOT_FOUND}
    case = [sys.executable, "-m", "gpu.sanitize", setting.backend, "cuda"]
    # Without torch's cache each tensor is an allocation, whose ends memcheck sees.
    uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [tool, "--tool", check, "--error-exitcode", str(ERROR_EXIT), "--print-limit", "5"]
    left = max(setting.deadline - time.monotonic(), 1.0)
    status, said = run_command([*command, *case], left, uncached)
    return judge(status, said)


def judge(status: int | None, said: str) -> Found:
    """What the tool's exit status (None where it was killed) and report mean.

    >>> judge(0, "the small case is done\\n========= ERROR SUMMARY: 0 errors")["outcome"]
    'pass'
    >>> judge(99, "========= ERROR SUMMARY: 2 errors")["outcome"]
    'fail'
    """
    summary = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*)", said)
    found: Found = {"summary": summary[-1] if summary else None}
    if status == 0 and summary and DONE in said:
        return found | {"outcome": PASS}
    found |= {"error": f"status {status}\n{said[-3000:]}"}
    if status is None:
        return found | {"outcome": f"{NO_TIME} for {TOOL}"}
    if not summary or "Device not supported" in said:
        return found | {"outcome": f"skipped: {TOOL} does not work here"}
    return found | {"outcome": FAIL}
