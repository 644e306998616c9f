"""What this machine can run: backends, versions, threads."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
import subprocess

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import stepclock_ext

from ..backends import native

__all__ = ["print_doctor"]


def print_doctor(console: Console) -> None:
    """Prints a table of the backends and a list of versions; nothing is built or warmed up."""
    table = Table(title="backends", title_justify="left")
    for name in ("name", "available", "reason"):
        table.add_column(name)
    for name, status in stepclock_ext.backends().items():
        table.add_row(name, "yes" if status.available else "no", Text(status.reason))
    console.print(table)
    for name, value in _facts().items():
        console.print(Text(f"{name:<14}{value}"), soft_wrap=True)


def _facts() -> dict[str, str]:
    return {
        "stepclock_ext": stepclock_ext.__version__,
        "python": platform.python_version(),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}",
        "matplotlib": _version_of("matplotlib"),
        "triton": _version_of("triton"),
        "compiler": getattr(native.load(), "COMPILER", "none: the C++ kernels were not built"),
        "nvcc": _nvcc(),
        "threads": f"{torch.get_num_threads()} (torch.get_num_threads())",
        "machine": f"{platform.system()} {platform.machine()}",
    }


def _nvcc() -> str:
    """The CUDA compiler that a build here would find, and its version."""
    path = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if path is None:
        return "not found"
    told = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    release = re.search(r"release ([\d.]+)", told)
    return f"{release[1] if release else 'of no known version'} ({path})"


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
