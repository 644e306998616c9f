"""What was found, as a JSON file and as a short table."""

from __future__ import annotations

import datetime
import json
import re
import subprocess
from pathlib import Path
from typing import Any

from gpu.outcomes import FAIL, PASS
from gpu.plan import MUST_PASS

__all__ = ["failed_stages", "print_table", "slug_of", "write_report"]

VERSIONS = ("python", "torch", "cuda", "driver", "triton")
ROOT = Path(__file__).resolve().parents[1]


def slug_of(card: str) -> str:
    """A card's name as a file's.

    >>> slug_of("NVIDIA H200")
    'nvidia-h200'
    """
    return re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-") or "unknown"


def failed_stages(stages: dict[str, Any]) -> list[str]:
    """Stages whose failure is the script's; without an environment there is nothing to pass."""
    return [
        name
        for name, found in stages.items()
        if (name.partition(":")[0] in MUST_PASS and found["outcome"] == FAIL)
        or (name == "environment" and found["outcome"] != PASS)
    ]


def write_report(
    folder: Path, stages: dict[str, Any], *, device: str, seconds: float
) -> tuple[Path, dict[str, Any]]:
    """Writes <card>.json.

    Returns:
        Its path, and what it holds.
    """
    environment = stages["environment"]
    card = environment.get("card", "unknown")
    report = {
        "card": card,
        "device": device,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "changed_files": len((_git("status", "--porcelain") or "").splitlines()),
        "versions": {name: environment.get(name) for name in VERSIONS},
        "seconds": round(seconds, 1),
        "passed": not failed_stages(stages),
        "failed": failed_stages(stages),
        "stages": stages,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{slug_of(card)}.json"
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return path, report


def _git(*arguments: str) -> str | None:
    """What git says; None where there is no repository, or no git."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def print_table(report: dict[str, Any]) -> None:
    """A line a stage, then a line a rival of each race."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    print(f"{report['card']}: {versions}; commit {report['commit']}, {report['seconds']} s")
    for name, found in report["stages"].items():
        print(f"  {name:<20}{found.get('seconds', 0.0):>7.1f} s  {found['outcome']}")
        if "error" in found:
            print(f"      {found['error'][:600]}")
    for name, found in report["stages"].items():
        for title, each in found.get("races", {}).items():
            copy = found["copy"]["gb_per_s"]
            print(
                f"{title}: {found['parameters']:,} parameters in {found['tensors']:,} tensors, "
                f"{name}; device copy {copy:,.0f} GB/s; {each['outcome']}"
            )
            for row in each["rows"]:
                print(_race_line(row))


def _race_line(row: dict[str, Any]) -> str:
    times = f"{row['median_ms']:>9.3f} ms ({row['low_ms']:.3f} to {row['high_ms']:.3f})"
    speed = f"{row['gb_per_s']:>7,.0f} GB/s, {100 * row['share_of_copy']:>3.0f} % of the copy"
    return f"  {row['name']:<46}{times:<34} x{row['ratio']:<6.2f}{speed}"
