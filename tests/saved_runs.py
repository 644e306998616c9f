"""Saved states of runs that were stopped somewhere, as a wrapper writes them, without a wrapper."""

from dataclasses import asdict

from plans import micro_plan

from stepclock_ext.fence import fingerprint
from stepclock_ext.remap import remap

SETTINGS = {
    "gradient_accumulation_steps": 1,
    "world_size": 1,
    "tail": "flush",
    "reduction": "mean",
    "max_grad_norm": None,
    "norm_type": 2.0,
}


def run(micro_steps, accumulation=1, **changes):
    """One epoch of single samples, peak 1, landing at 0.1 after a straight line or a cosine."""
    rates = {"learning_rate": 1.0, "min_lr": 0.1, "num_train_epochs": 1}
    if changes.get("max_steps", -1) > 0:
        rates.pop("num_train_epochs")
    return micro_plan(micro_steps, accumulation, **{**rates, **changes})


def positions(plan):
    """Every clock of a run under `plan`, after each micro step and each end of an epoch."""
    updates = window = 0
    for epoch in range(plan.num_epochs):
        for micro_step in range(1, plan.micro_steps_per_epoch + 1):
            window += 1
            if window == plan.gradient_accumulation_steps:
                updates, window = updates + 1, 0
            yield clock(updates, epoch, micro_step, window)
        if window and plan.tail == "flush":
            updates, window = updates + 1, 0
        window = 0 if plan.tail == "drop" else window
        yield clock(updates, epoch + 1, 0, window)


def clock(update_step, epoch=0, micro_step_in_epoch=0, micro_step_in_window=0):
    return {
        "update_step": update_step,
        "epoch": epoch,
        "micro_step_in_epoch": micro_step_in_epoch,
        "micro_step_in_window": micro_step_in_window,
    }


def saved(plan, at, *, curve=None, settings=SETTINGS):
    """The state at a clock; an int is that many updates of one epoch of full windows."""
    if isinstance(at, int):
        at = clock(at, 0, at * plan.gradient_accumulation_steps)
    own = {"fingerprint": fingerprint(plan, settings), "clock": at}
    if curve is not None:
        own["curve"] = asdict(curve)
    return {"state": {}, "param_groups": [], "stepclock": own}


def rates(curve, first, last):
    return [curve.lr_at(update) for update in range(first, last + 1)]


def after(old, at, new, how, **options):
    """The curve after a remap of a run stopped at `at`."""
    return remap(saved(old, at), new, how, **options).curve
