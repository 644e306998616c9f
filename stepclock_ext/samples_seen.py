"""Samples seen at a resume: where they stand in the old plan, and how the new one goes on."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from .plan import TrainPlan
from .sample_map import Rhythm, SampleMap
from .saved_run import Position, SavedRun, position_in, samples_in_epoch

__all__ = ["sample_map"]


def sample_map(run: SavedRun, plan: TrainPlan, position: Position, remaining: int) -> SampleMap:
    """The map from the new updates to the old ones.

    Raises:
        ValueError: the old plan and the new one do not see the same number of samples in all.
    """
    assert run.plan is not None and run.curve is not None and run.update_step is not None
    old_rhythm, (now, window_start) = Rhythm.of(run.plan), _samples_seen(run)
    anchor = old_rhythm.piece_at(window_start) / old_rhythm.pieces_per_update
    old_remaining = run.curve.total_updates - run.update_step
    by_steps = run.plan.max_steps > 0
    forward = _forward(plan, position)
    seen = forward["epoch_end"] - _to_epoch_end(plan, position)
    samples = SampleMap(
        old=old_rhythm,
        anchor=anchor,
        end=anchor + old_remaining if by_steps else run.plan.total_updates,
        shift=now - seen,
        **forward,
    )
    old_position = position_in(run.plan, run)
    old_left = _samples_left(run.plan, old_position, old_remaining)
    new_left = _samples_left(plan, position, remaining)
    exact = run.plan.max_steps < 0 and plan.max_steps < 0
    if abs(old_left - new_left) >= (Fraction(1, 10**6) if exact else plan.effective_batch_size):
        raise ValueError(
            f"remap: 'by_samples' needs the same number of samples in all, got "
            f"{float(now + old_left):g} in the old plan and {float(now + new_left):g} now"
            f"{_way_out(run, plan, old_left)}"
        )
    return samples


def _way_out(run: SavedRun, plan: TrainPlan, left: Fraction) -> str:
    assert run.update_step is not None
    other = "use 'by_progress', 'keep_lr' or 'hold'"
    if plan.max_steps < 0:
        return f"; {other}"
    updates = run.update_step + math.ceil(left / plan.effective_batch_size)
    return f"; max_steps counts the {run.update_step} updates done: set about {updates}, or {other}"


def _samples_seen(run: SavedRun) -> tuple[int, int]:
    """Samples up to the saved place, and up to where its open window began."""
    plan = run.plan
    assert plan is not None
    epoch, micro_step = run.epoch, run.micro_step_in_epoch
    if plan.dataset_size is None or plan.micro_steps_per_epoch is None:
        per_update = plan.effective_batch_size
        window = run.micro_step_in_window * per_update // plan.gradient_accumulation_steps
        start = (run.update_step or 0) * per_update
        return start + window, start
    now = epoch * plan.dataset_size + samples_in_epoch(plan, micro_step)
    opened = epoch * plan.micro_steps_per_epoch + micro_step - run.micro_step_in_window
    epoch, micro_step = divmod(max(0, opened), plan.micro_steps_per_epoch)
    if micro_step == 0 and run.micro_step_in_epoch == plan.micro_steps_per_epoch and epoch:
        epoch, micro_step = epoch - 1, plan.micro_steps_per_epoch
    return now, epoch * plan.dataset_size + samples_in_epoch(plan, micro_step)


def _to_epoch_end(plan: TrainPlan, position: Position) -> int:
    return 0 if plan.dataset_size is None else plan.dataset_size - position.samples_in_epoch


def _forward(plan: TrainPlan, position: Position) -> dict[str, Any]:
    """How the new plan's windows go on from `position`: fields of a `SampleMap`."""
    size, samples = plan.gradient_accumulation_steps, position.samples_in_epoch
    per_micro_step = plan.per_device_train_batch_size * plan.world_size
    opened = position.micro_step_in_window
    rhythm = Rhythm.of(plan)
    if plan.dataset_size is None or plan.micro_steps_per_epoch is None:
        start, end, first = samples - opened * per_micro_step, samples, 0
    else:
        seen = position.epoch * plan.dataset_size + samples
        end = (position.epoch + 1) * plan.dataset_size
        left = plan.micro_steps_per_epoch - position.micro_step_in_epoch
        if plan.tail == "carry":
            start, first = seen, left
        else:
            start = seen - opened * per_micro_step
            windows = (left + opened) / size
            first = math.ceil(windows) if plan.tail == "flush" else math.floor(windows)
    carries = plan.tail == "carry" and plan.dataset_size is not None
    open_pieces = opened if carries else 0
    fields = {"new": rhythm, "start": start, "epoch_end": end}
    return {**fields, "first_pieces": first, "open_pieces": open_pieces}


def _samples_left(plan: TrainPlan, position: Position, remaining: int) -> Fraction:
    """Samples from `position` on: of the epochs, or of `remaining` updates with max_steps."""
    if plan.max_steps < 0:
        assert plan.dataset_size is not None and plan.num_train_epochs is not None
        epochs = Fraction(str(plan.num_train_epochs)) - position.epoch
        return plan.dataset_size * epochs - position.samples_in_epoch
    forward = _forward(plan, position)
    seen = forward["epoch_end"] - _to_epoch_end(plan, position)
    ends = SampleMap(old=forward["new"], shift=0, anchor=0, end=0, **forward)
    return Fraction(ends.samples_after(remaining) - seen)
