"""Prints what the races found, as one table at the end of the run."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.table import Table

import stepclock_ext


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """One table for every race, after pytest-benchmark's own."""
    session = getattr(config, "_benchmarksession", None)
    races = [bench for bench in getattr(session, "benchmarks", []) if "rows" in bench.extra_info]
    if not races:
        return
    console = Console(width=118, file=terminalreporter._tw._file)
    console.print(machine_line())
    for race in races:
        table = Table(title=race.name, title_justify="left")
        for column in ("rival", "median ms", "quartiles", "ratio", "bytes", "GB/s"):
            table.add_column(column, justify="left" if column == "rival" else "right")
        for row in race.extra_info["rows"]:
            table.add_row(
                row["name"],
                f"{row['median_ms']:.2f}",
                f"{row['low_ms']:.2f} to {row['high_ms']:.2f}",
                f"{row['ratio']:.2f}",
                f"{row['bytes']:,}",
                f"{row['gb_per_s']:.1f}",
            )
        console.print(table)
        for note in race.extra_info.get("notes", []):
            console.print(f"  {note}")


def machine_line() -> str:
    """Processor, threads and versions."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = models[0].split(":")[1].strip() if models else name
    backend = stepclock_ext.backends()["cpu"]
    return (
        f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}, stepclock_ext "
        f"{stepclock_ext.__version__}, cpu backend: {backend.reason}"
    )
