"""What planning costs: one rate, a whole run of a million updates, and a look through the fence."""

from __future__ import annotations

from typing import Any

import pytest

from stepclock_ext.fence import LRFence, fingerprint
from stepclock_ext.plan import TrainPlan
from stepclock_ext.schedules import KINDS


def _plan(kind: str = "cosine", accumulation: int = 8) -> TrainPlan:
    return TrainPlan(
        dataset_size=800_000_000,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=1,
        learning_rate=1e-3,
        lr_scheduler_type=kind,
        warmup_ratio=0.03,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_one_rate(benchmark: Any, kind: str) -> None:
    plan = _plan(kind)
    assert plan.total_updates > 1_000_000
    benchmark(plan.lr_at, plan.total_updates - 50_000)


def test_a_run_of_a_million_updates(benchmark: Any) -> None:
    def whole() -> float:
        plan = _plan()
        plan.notes()
        return plan.lr_at(plan.total_updates)

    assert benchmark(whole) == 0.0


@pytest.mark.parametrize("remap", [None, "by_samples", "by_progress", "keep_lr", "hold"])
def test_a_look_through_the_fence(benchmark: Any, remap: str | None) -> None:
    clock = {"update_step": 1_000_000, "epoch": 0, "micro_step_in_epoch": 8_000_000}
    saved = fingerprint(_plan(), {})
    state = {"stepclock": {"fingerprint": saved, "clock": {**clock, "micro_step_in_window": 0}}}
    fence = LRFence(_plan(accumulation=4))
    report = benchmark(fence.check, state, remap=remap)
    assert not report.matches
