"""`make gpu`: parity, sanitizer, waits and races on a GPU, in under six minutes with the build.

Each stage runs in a process of its own, so that a fault of the device ends that stage alone; this
process never touches the device. ``python -m gpu.run --dry-run`` goes the same way on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from gpu.outcomes import FAIL, NO_GPU, NO_TIME
from gpu.plan import ENVIRONMENT_S, LIMIT_S, Job, jobs_of
from gpu.processes import run_command
from gpu.report import failed_stages, print_table, write_report

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[1]
GRACE_S = 10.0  # that a process may overrun before it is killed
LEAST_S = 8.0  # torch's import alone takes some
MOST_JOBS = 12  # side by side; each holds a context of the device


@dataclass(frozen=True)
class Run:
    """One run of the script.

    Attributes:
        is_dry: on a CPU, with tiny sizes.
        deadline: on `time.monotonic`, for everything.
        scratch: folder where stages leave what they found.
        num_threads: of a process, for the specification.
    """

    is_dry: bool
    deadline: float
    scratch: Path
    num_threads: int = 1

    @property
    def device(self) -> str:
        return "cpu" if self.is_dry else "cuda"

    def job(self, job: Job, backends: list[str], reserved: float = 0.0) -> dict[str, Any]:
        """Runs a job's stages; `reserved` seconds are kept for what comes after it."""
        seconds = min(job.seconds, self.deadline - time.monotonic() - reserved - GRACE_S)
        if seconds < LEAST_S:
            return {name: {"outcome": NO_TIME} for name in job.names}
        command = [sys.executable, "-m", "gpu.stage", "--out", str(self.scratch)]
        command += ["--device", self.device, "--backends", ",".join(backends)]
        command += ["--seconds", str(seconds), *["--small"] * self.is_dry, *job.names]
        variables = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(self.num_threads))}
        status, said = run_command(command, seconds + GRACE_S, variables)
        ended = "took too long and was killed" if status is None else f"ended with status {status}"
        lost = {"outcome": FAIL, "error": f"its process {ended}\n{said[-2000:]}"}
        return {name: self._found(name) or lost for name in job.names}

    def _found(self, name: str) -> dict[str, Any] | None:
        path = self.scratch / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def run_all(run: Run, num_jobs: int) -> Iterator[tuple[str, Any]]:
    """Every stage by name, with what it found."""
    environment = run.job(Job(("environment",), ENVIRONMENT_S), [])
    yield from environment.items()
    found = environment["environment"]
    backends = choose_backends(found.get("available", []), is_dry=run.is_dry)
    jobs = jobs_of(backends, is_dry=run.is_dry)
    if found["outcome"] != "pass":
        why = NO_TIME if found["outcome"] == NO_TIME else NO_GPU
        yield from ((name, {"outcome": why}) for job in jobs for name in job.names)
        return
    for is_alone, group in groupby(jobs, key=lambda job: job.is_alone):
        batch = list(group)
        with ThreadPoolExecutor(1 if is_alone else num_jobs) as pool:
            later = reserves(batch, jobs) if is_alone else [sum_alone(jobs)] * len(batch)
            for result in pool.map(lambda j, r: run.job(j, backends, r), batch, later):
                yield from result.items()


def choose_backends(available: list[str], *, is_dry: bool) -> list[str]:
    """The two for GPUs, there or not; in a dry run those that stand in for them.

    >>> choose_backends(["reference", "cpu"], is_dry=True)
    ['cpu', 'reference']
    """
    if not is_dry:
        return ["cuda", "triton"]
    return [name for name in ("cpu", "reference", "triton") if name in available]


def sum_alone(jobs: Iterable[Job]) -> float:
    """Seconds of the jobs that run alone."""
    return sum(job.seconds for job in jobs if job.is_alone)


def reserves(batch: list[Job], jobs: list[Job]) -> list[float]:
    """What each of the last jobs leaves to those behind it."""
    return [sum_alone(jobs[jobs.index(job) + 1 :]) for job in batch]


def main(arguments: list[str] | None = None) -> int:
    """Runs the stages, writes the report and prints it; 1 where a stage that must pass failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, with tiny sizes")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--began", type=float, default=None, help="time of the build, Unix")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds since then")
    parser.add_argument("--jobs", type=int, default=max(1, min(MOST_JOBS, os.cpu_count() or 1)))
    given = parser.parse_args(arguments)
    spent = 0.0 if given.began is None else max(0.0, time.time() - given.began)
    started = time.monotonic() - spent
    with tempfile.TemporaryDirectory(prefix="stepclock-gpu-") as scratch:
        num_threads = max(1, (os.cpu_count() or 1) // given.jobs)
        run = Run(given.dry_run, started + given.limit, Path(scratch), num_threads)
        stages = dict(run_all(run, given.jobs))
    seconds = time.monotonic() - started
    path, report = write_report(given.out, stages, device=run.device, seconds=seconds)
    print_table(report)
    failed = failed_stages(stages)
    print(f"{path}: {'failed: ' + ', '.join(failed) if failed else 'passed'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
