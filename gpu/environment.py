"""Versions, and the card that is used."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess

import torch

from gpu.outcomes import FAIL, PASS
from gpu.setting import Found, Setting
from stepclock_ext import backends

__all__ = ["run"]


def run(setting: Setting) -> Found:
    """What the numbers were measured on; fails where there is nothing to measure on."""
    found: Found = {
        "outcome": PASS,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": version_of("triton"),
        "driver": driver_version(),
        "backends": {name: f"{s.available}: {s.reason}" for name, s in backends().items()},
        "available": [name for name, s in backends().items() if s.available],
    }
    if not setting.device.is_cuda:
        return found | {"card": "cpu", "capability": None, "multiprocessors": 0}
    if not torch.cuda.is_available():
        return found | {"outcome": FAIL, "error": "torch sees no CUDA device"}
    card = torch.cuda.get_device_properties(0)
    return found | {
        "card": card.name,
        "capability": f"{card.major}.{card.minor}",
        "multiprocessors": card.multi_processor_count,
        "memory_bytes": card.total_memory,
        "free_bytes": setting.device.free_bytes(),
    }


def version_of(package: str) -> str | None:
    """None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def driver_version() -> str | None:
    """As nvidia-smi says; None without it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True)
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else None
