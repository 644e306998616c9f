"""The shapes of schedules, against the formulas of transformers.optimization."""

import math

import pytest
from plans import schedule

# At its current_step, written out.


def hf_linear(step, warmup, total):
    return max(0.0, (total - step) / max(1, total - warmup))


def hf_cosine(step, warmup, total):
    progress = (step - warmup) / max(1, total - warmup)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * 0.5 * 2.0 * progress)))


def hf_polynomial(power):
    return lambda step, warmup, total: (1 - (step - warmup) / (total - warmup)) ** power


def hf_inverse_sqrt(timescale=None):
    def formula(step, warmup, total):
        scale = timescale or warmup or 10_000
        return 1.0 / math.sqrt((step + scale - warmup) / scale)

    return formula


def hf_wsd(num_decay, fall):
    def formula(step, warmup, total):
        num_stable = total - warmup - num_decay
        if step < warmup + num_stable:
            return 1.0
        return fall((step - warmup - num_stable) / max(1, num_decay)) if step < total else 0.0

    return formula


FALLS = {
    "linear": lambda p: 1.0 - p,
    "cosine": lambda p: 0.5 * (1.0 + math.cos(math.pi * p)),
    "1-sqrt": lambda p: 1.0 - math.sqrt(p),
}
FORMULAS = {
    "linear": ("linear", {}, hf_linear),
    "cosine": ("cosine", {}, hf_cosine),
    "cosine_with_min_lr": ("cosine_with_min_lr", {}, hf_cosine),
    "polynomial 1": ("polynomial", {}, hf_polynomial(1.0)),
    "polynomial 2.5": ("polynomial", {"power": 2.5}, hf_polynomial(2.5)),
    "inverse_sqrt": ("inverse_sqrt", {}, hf_inverse_sqrt()),
    "inverse_sqrt 50": ("inverse_sqrt", {"timescale": 50}, hf_inverse_sqrt(50)),
    "constant_with_warmup": ("constant_with_warmup", {}, lambda *_: 1.0),
    "wsd a tenth": ("warmup_stable_decay", {}, hf_wsd(11, FALLS["cosine"])),
    **{
        f"wsd {name}": (
            "warmup_stable_decay",
            {"num_decay_steps": 30, "decay_type": name},
            hf_wsd(30, fall),
        )
        for name, fall in FALLS.items()
    },
}


@pytest.mark.parametrize("kind, shape, formula", FORMULAS.values(), ids=FORMULAS)
@pytest.mark.parametrize("warmup", [0, 10])
@pytest.mark.parametrize("low", [0.0, 1e-4])
def test_the_shape_is_that_of_transformers(kind, shape, formula, warmup, low):
    curve = schedule(kind, warmup=warmup, low=low, **shape)
    for update in range(1, 111):
        factor = update / warmup if update < warmup else formula(update, warmup, 110)
        expected = 1e-3 * factor if update < warmup else low + (1e-3 - low) * factor
        assert curve.lr_at(update) == pytest.approx(expected, rel=1e-12, abs=1e-18), update
