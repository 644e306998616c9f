"""Schedules and plans for the tests: of each, one that everybody varies."""

from stepclock_ext.plan import TrainPlan
from stepclock_ext.schedules import Schedule


def schedule(kind="cosine", *, peak=1e-3, low=1e-4, warmup=10, total=110, **shape):
    warmup = 0 if kind == "constant" else warmup
    rates = {"learning_rate": peak, "min_lr": low}
    return Schedule(kind, warmup_updates=warmup, total_updates=total, **rates, **shape)


def plan(**changes):
    arguments = {
        "dataset_size": 24_000,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 8,
        "world_size": 8,
        "num_train_epochs": 3,
        "learning_rate": 1e-3,
    }
    return TrainPlan(**{**arguments, **changes})


def micro_plan(micro_steps, accumulation, **changes):
    """A plan of that many micro steps an epoch."""
    batch = {"per_device_train_batch_size": 1, "world_size": 1}
    steps = {"dataset_size": micro_steps, "gradient_accumulation_steps": accumulation}
    return plan(**{**batch, **steps, **changes})


def from_keys(**changes):
    """A plan from a small configuration; a change to None takes a key away."""
    settings = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 8,
        "learning_rate": 1e-3,
        "num_train_epochs": 3,
        "lr_scheduler_type": "linear",
        "world_size": 8,
        "dataset_size": 24_000,
        **changes,
    }
    return TrainPlan.from_mapping({k: v for k, v in settings.items() if v is not None})


def heard(run, *words, **asked):
    """Whether one note of the plan holds all these words."""
    return any(all(word in note for word in words) for note in run.notes(**asked))
