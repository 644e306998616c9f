"""Processes of this machine that run something together: gloo on loopback, one thread each.

Two of them fill two cores. What they time, they time side by side: a barrier before each stretch,
and the slower rank's seconds count.
"""

from __future__ import annotations

import os
import pickle
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from interleave import Race
from rich.console import Console
from rich.table import Table

__all__ = ["SHRINK", "JointRace", "print_table", "report", "run"]

# Divides sizes, to try a bench out: BENCH_SHRINK=8.
SHRINK = int(os.environ.get("BENCH_SHRINK", "1"))
WARM_UP = 2
_TIMEOUT = timedelta(minutes=5)


def run(function: Callable[..., Any], *args: Any, num_ranks: int = 2) -> list[Any]:
    """Results of `function(rank, *args)` on fresh processes, in the order of the ranks.

    Args:
        function: at the top level of a module; arguments and results are picklable.
        num_ranks: how many processes there are.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, _environment():
        torch.multiprocessing.spawn(_serve, (num_ranks, folder, function, args), nprocs=num_ranks)
        files = [Path(folder, f"result.{rank}") for rank in range(num_ranks)]
        return [pickle.loads(file.read_bytes()) for file in files]


@contextmanager
def _environment() -> Iterator[None]:
    """What a process of one thread must know before it imports torch."""
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    before = dict(os.environ)
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME=loopback)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _serve(
    rank: int, num_ranks: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), num_ranks)  # says nothing on loopback
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=_TIMEOUT)
    try:
        result = function(rank, *args)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    Path(folder, f"result.{rank}").write_bytes(pickle.dumps(result))


class JointRace(Race):
    """Rivals that are raced by all ranks at once; the first one is ours."""

    def rows(self) -> list[dict[str, Any]]:
        """Runs all rounds; what each rival came to, the same on every rank.

        A stretch begins behind a barrier, and lasts as long as the slowest rank takes.
        """
        times: dict[str, list[float]] = {rival.name: [] for rival in self.rivals}
        for _ in range(WARM_UP + self.rounds):
            for rival in self.rivals:
                rival.prepare()
                dist.barrier()
                start = time.perf_counter()
                rival.run()
                times[rival.name].append(time.perf_counter() - start)
        slowest = torch.tensor(list(times.values()), dtype=torch.float64)[:, WARM_UP:].contiguous()
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        self.seconds = dict(zip(times, slowest.tolist(), strict=True))
        return [self._row(rival) for rival in self.rivals]


def report(benchmark: Any, function: Callable[..., Any], *args: Any) -> None:
    """Runs `function` on two ranks; its rows and notes are printed at the end of the run.

    pytest-benchmark's own table has the whole call, processes and checks included.
    """
    results = benchmark.pedantic(lambda: run(function, *args), rounds=1)
    rows, notes = results[0]
    benchmark.extra_info["rows"] = rows
    where = "2 ranks of 1 thread, gloo on loopback; a stretch lasts as long as the slower rank"
    benchmark.extra_info["notes"] = [where, *notes]


def print_table(
    capsys: Any, title: str, columns: list[str], rows: list[list[str]], notes: list[str]
) -> None:
    """A table of what is counted, not timed, at once."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    with capsys.disabled():
        console = Console(width=118)
        console.print()
        console.print(table)
        for note in notes:
            console.print(f"  {note}", markup=False, highlight=False)
