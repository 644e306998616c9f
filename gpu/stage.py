"""Runs stages in a process of their own: ``python -m gpu.stage --out DIR ... NAME...``.

A fault of the device ends this process and no other. Each stage leaves DIR/<name>.json.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
import traceback
from pathlib import Path

from gpu.outcomes import FAIL
from gpu.setting import Found, Setting

__all__ = ["main", "run_stage"]

# Module and function of each kind of stage; the name's part after the colon is a backend, or for
# a race which one.
KINDS = {
    "environment": ("environment", "run", ()),
    "gradients": ("parity", "run", ("gradients",)),
    "adam": ("parity", "run", ("adam",)),
    "sgd": ("parity", "run", ("sgd",)),
    "training": ("training", "run", ()),
    "launches": ("launches", "count", ()),
    "sync": ("waits", "run", ()),
    "graph": ("launches", "replay", ()),
    "memcheck": ("sanitizer", "run", ("memcheck",)),
    "racecheck": ("sanitizer", "run", ("racecheck",)),
}


def run_stage(
    name: str, device: str, backends: list[str], *, is_small: bool, until: float
) -> Found:
    """What a stage found; an error is a finding."""
    started = time.monotonic()
    try:
        from gpu.device import Device

        kind, _, which = name.partition(":")
        names = tuple(backends) if kind in ("bench", "environment") else (which,)
        setting = Setting(Device(device), names, is_small, until)
        if kind == "bench":
            found: Found = importlib.import_module("gpu.benchmark").PARTS[which](setting)
        else:
            module, function, arguments = KINDS[kind]
            run = getattr(importlib.import_module(f"gpu.{module}"), function)
            found = run(setting, *arguments)
    except Exception as e:
        trace = traceback.format_exc()[-3000:]
        found = {"outcome": FAIL, "error": f"{type(e).__name__}: {e}", "traceback": trace}
    return found | {"seconds": round(time.monotonic() - started, 2)}


def main() -> None:
    """Runs the stages that are named, one after another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--backends", default="")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    backends = [name for name in given.backends.split(",") if name]
    until = time.monotonic() + given.seconds
    for name in given.names:
        found = run_stage(name, given.device, backends, is_small=given.small, until=until)
        path = given.out / f"{name}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(found, default=str), encoding="utf-8")
        os.replace(part, path)


if __name__ == "__main__":
    main()
