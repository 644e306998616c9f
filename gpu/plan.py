"""Which stages run, in which order, and how long each may take."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LIMIT_S", "MUST_PASS", "RACES", "Job", "jobs_of"]

LIMIT_S = 350.0  # of everything, the build included
# A failure of these is the script's. What a race or a graph finds is reported.
MUST_PASS = ("gradients", "adam", "sgd", "training", "launches", "sync", "memcheck", "racecheck")

ENVIRONMENT_S = 60.0  # the first import of torch on a cold disk
CHECKS_S = 150.0  # Triton compiles some hundred kernels, a second each, in three processes
SANITIZER_S = 120.0
RACES = {"bench:fp32": 45.0, "bench:bf16": 35.0, "bench:small": 30.0}

_PARITY = ("adam", "sgd", "gradients")
_CHECKS = (*_PARITY, "training", "sync", "launches", "graph")
_SANITIZERS = ("memcheck", "racecheck")


@dataclass(frozen=True)
class Job:
    """Stages that share a process.

    Attributes:
        names: of the stages.
        seconds: that they may take together.
        is_alone: nothing else may run meanwhile.
    """

    names: tuple[str, ...]
    seconds: float
    is_alone: bool = False


def jobs_of(backends: list[str], *, is_dry: bool) -> list[Job]:
    """All but the environment, in order: checks side by side, then races one by one.

    On a GPU each stage has a process, which a fault may end. A dry run imports torch once: one
    backend stands in for both, and Triton's interpreter is tried on very little.
    """
    if is_dry:
        first = [f"{kind}:{backends[0]}" for kind in (*_CHECKS, *_SANITIZERS) if backends]
        interpreted = [f"{kind}:triton" for kind in _PARITY if "triton" in backends]
        return [Job((*first, *RACES, *interpreted), CHECKS_S)]
    # What takes longest goes first.
    tools = [f"{kind}:{name}" for name in backends for kind in _SANITIZERS]
    checks = [f"{kind}:{name}" for name in reversed(backends) for kind in _CHECKS]
    listed = [Job((name,), SANITIZER_S) for name in tools]
    listed += [Job((name,), CHECKS_S) for name in checks]
    return listed + [Job((name,), seconds, is_alone=True) for name, seconds in RACES.items()]
