"""The plan of a run: from data, batch and ranks to updates, warm-up and landing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch.optim import Optimizer

from . import plan_counts, plan_files, plan_notes
from .plan_arguments import check_arguments, check_totals, solve_accumulation
from .plan_files import PlanSource
from .plan_scheduler import PlanScheduler
from .schedules import Schedule, scale_learning_rate

__all__ = ["TrainPlan"]


@dataclass(frozen=True, kw_only=True)
class TrainPlan:
    """What a run will do, counted before it starts::

        effective batch   = per_device_train_batch_size * gradient_accumulation_steps * world_size
        samples of a rank = dataset_size / world_size     padded up; sampler_drop_last: down
        micro steps       = samples of a rank / per_device_train_batch_size
                                                          up; dataloader_drop_last: down
        updates an epoch  = micro steps / gradient_accumulation_steps
                                                          up with tail="flush", else down
        total updates     = max_steps, or epochs * updates an epoch, or with tail="carry"
                            epochs * micro steps / gradient_accumulation_steps, down

    Args:
        dataset_size: samples in an epoch, over all ranks; None for a loader without a length.
        per_device_train_batch_size: samples in a micro batch of one rank.
        gradient_accumulation_steps: micro steps in a window.
        world_size: ranks that read different data, on all nodes together.
        num_train_epochs: epochs; a fraction is allowed, and its updates are rounded up.
        max_steps: updates of the run; wins over epochs. -1 counts by epochs.
        learning_rate: the peak; the base rate of a parameter group.
        lr_scheduler_type: a kind from `schedules.KINDS`.
        warmup_ratio: share of all updates; the exact decimal product is rounded up.
        warmup_steps: updates of warm-up; wins over the ratio. "constant" has no warm-up.
        min_lr: the rate of the last update, for a schedule that lands.
        dataloader_drop_last: the loader drops its incomplete last batch.
        sampler_drop_last: the sampler drops what does not divide among the ranks.
        tail: what becomes of the short window at an epoch's end: "flush", "carry" or "drop".
        lr_scheduler_kwargs: the shape's own parameters, as in `Schedule`: power, timescale,
            num_decay_steps, decay_type.
        source: where the plan was read from; None if it was written in code.

    Raises:
        TypeError, ValueError: an argument is outside its range, or the run has no update.

    Example:
        >>> plan = TrainPlan(
        ...     dataset_size=24_000, per_device_train_batch_size=4, gradient_accumulation_steps=8,
        ...     world_size=8, num_train_epochs=3, learning_rate=3e-4, min_lr=3e-5,
        ...     warmup_ratio=0.05,
        ... )
        >>> plan.effective_batch_size, plan.updates_per_epoch, plan.total_updates
        (256, 94, 282)
        >>> plan.warmup_updates, plan.lr_at(15), plan.lr_at(282)
        (15, 0.0003, 3e-05)
    """

    dataset_size: int | None
    per_device_train_batch_size: int
    gradient_accumulation_steps: int = 1
    world_size: int = 1
    num_train_epochs: float | None = None
    max_steps: int = -1
    learning_rate: float
    lr_scheduler_type: str = "cosine"
    warmup_ratio: float = 0.0
    warmup_steps: int = 0
    min_lr: float = 0.0
    dataloader_drop_last: bool = False
    sampler_drop_last: bool = False
    tail: str = "flush"
    lr_scheduler_kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    source: PlanSource | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_arguments(self)
        object.__setattr__(self, "lr_scheduler_kwargs", dict(self.lr_scheduler_kwargs))
        check_totals(self)

    @classmethod
    def from_global_batch(
        cls,
        *,
        global_batch_size: int,
        per_device_train_batch_size: int,
        world_size: int = 1,
        **arguments: Any,
    ) -> TrainPlan:
        """The plan whose effective batch is `global_batch_size`.

        Args:
            global_batch_size: samples in an update, over all ranks.
            per_device_train_batch_size: samples in a micro batch of one rank.
            world_size: ranks, on all nodes together.
            arguments: the others, as for `TrainPlan`.

        Raises:
            ValueError: no whole accumulation gives it; the message offers the nearest that fit.

        Example:
            >>> TrainPlan.from_global_batch(
            ...     global_batch_size=1024, per_device_train_batch_size=16, world_size=16,
            ...     dataset_size=None, max_steps=100, learning_rate=1e-4,
            ... ).gradient_accumulation_steps
            4
        """
        if "gradient_accumulation_steps" in arguments:
            raise TypeError(
                "TrainPlan.from_global_batch: gradient_accumulation_steps is what is solved for; "
                "leave it out, or call TrainPlan"
            )
        steps = solve_accumulation(global_batch_size, per_device_train_batch_size, world_size)
        return cls(
            per_device_train_batch_size=per_device_train_batch_size,
            gradient_accumulation_steps=steps,
            world_size=world_size,
            **arguments,
        )

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any], **given: Any) -> TrainPlan:
        """The plan of a configuration of Hugging Face Trainer, ms-swift or LLaMA-Factory.

        Args:
            settings: keys as those systems have them; ms-swift's may stand under ``train_args``.
            given: arguments of `TrainPlan` that win over the configuration, unless None; data and
                ranks (`dataset_size`, `world_size`) are seldom in a file.

        Raises:
            TypeError, ValueError: a key is missing or outside its range; the message names it.

        Example:
            >>> plan = TrainPlan.from_mapping(
            ...     {"per_device_train_batch_size": 8, "learning_rate": "1e-4", "max_steps": 50,
            ...      "output_dir": "out"},
            ... )
            >>> plan.total_updates, plan.learning_rate, plan.source.unknown_keys
            (50, 0.0001, ('output_dir',))
        """
        arguments, source = plan_files.translate(settings, given)
        return cls(**arguments, source=source)

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str], **given: Any) -> TrainPlan:
        """The plan of a YAML file; see `from_mapping`.

        Raises:
            OSError: the file cannot be read.
            TypeError, ValueError: it is no YAML mapping, or as for `from_mapping`.
        """
        return cls.from_mapping(plan_files.read_yaml(path), **given)

    # Counts.

    @property
    def effective_batch_size(self) -> int:
        """Samples in a full window, over all ranks."""
        ranks = self.per_device_train_batch_size * self.world_size
        return ranks * self.gradient_accumulation_steps

    @cached_property
    def micro_steps_per_epoch(self) -> int | None:
        """Micro steps of a rank in an epoch; None without a length."""
        return plan_counts.micro_steps_per_epoch(self)

    @cached_property
    def updates_per_epoch(self) -> int | None:
        """Updates in an epoch; with tail="carry", in the first one. None without a length."""
        return plan_counts.updates_per_epoch(self)

    @cached_property
    def total_updates(self) -> int:
        """Updates of the run."""
        return plan_counts.total_updates(self)

    @cached_property
    def num_epochs(self) -> int | None:
        """Epochs that are begun; with `max_steps` those it takes. None without a length."""
        return plan_counts.num_epochs(self)

    def remaining_updates(
        self,
        update: int,
        *,
        epoch: int | None = None,
        micro_step_in_epoch: int = 0,
        micro_step_in_window: int = 0,
    ) -> int:
        """Updates that are left after `update`, never less than 0.

        With a position, they are counted from the data that is left, as is right when the updates
        so far were made with another batch or some were skipped. With `max_steps` the position does
        not matter.

        Args:
            update: updates done.
            epoch: epochs ended, as a clock counts them; None goes by `update`.
            micro_step_in_epoch: micro steps of this epoch that are done.
            micro_step_in_window: those in the open window, from the epoch before too.

        Example:
            >>> plan = TrainPlan(
            ...     dataset_size=7, per_device_train_batch_size=1, gradient_accumulation_steps=4,
            ...     num_train_epochs=2, learning_rate=0.1,
            ... )
            >>> plan.remaining_updates(1), plan.remaining_updates(1, epoch=0, micro_step_in_epoch=5)
            (3, 3)
        """
        if epoch is None or self.max_steps > 0:
            return max(0, self.total_updates - update)
        position = {
            "epoch": epoch,
            "micro_step_in_epoch": micro_step_in_epoch,
            "micro_step_in_window": micro_step_in_window,
        }
        return max(0, plan_counts.remaining_updates(self, **position))

    # The learning rate.

    @cached_property
    def warmup_updates(self) -> int:
        """Updates of warm-up; the last of them uses the peak."""
        return plan_counts.warmup_updates(self)

    @cached_property
    def schedule(self) -> Schedule:
        """The learning rate as a value."""
        return Schedule(
            self.lr_scheduler_type,
            learning_rate=self.learning_rate,
            total_updates=self.total_updates,
            warmup_updates=self.warmup_updates,
            min_lr=self.min_lr,
            **self.lr_scheduler_kwargs,
        )

    def lr_at(self, update: int) -> float:
        """The rate that `update` uses, from 1 on; past the end it stays where it was."""
        return self.schedule.lr_at(update)

    def make_scheduler(self, optimizer: Optimizer) -> PlanScheduler:
        """A torch scheduler of this plan on `optimizer`, to be stepped once per update.

        Raises:
            ValueError: `learning_rate` is not the base rate of a group.
        """
        return PlanScheduler(optimizer, self.schedule)

    def scaled_learning_rate(self, old_batch_size: int, rule: str) -> float:
        """`learning_rate`, found for `old_batch_size`, moved to this plan's effective batch.

        Args:
            old_batch_size: the effective batch that the rate was found for.
            rule: "linear", "sqrt" or "none".
        """
        return scale_learning_rate(
            self.learning_rate,
            old_batch_size=old_batch_size,
            new_batch_size=self.effective_batch_size,
            rule=rule,
        )

    def notes(self, *, lora: bool | None = None, old_batch_size: int | None = None) -> list[str]:
        """What was read from the file, which argument won, and advice; nothing of it is applied.

        Args:
            lora: adapters are trained; None takes what the file says.
            old_batch_size: the effective batch that `learning_rate` was found for.
        """
        return plan_notes.notes_of(self, lora=lora, old_batch_size=old_batch_size)
