"""What the noise-scale tests share: exact micro gradients, and the estimate from them directly."""

import math
from dataclasses import dataclass

import torch
from helpers import given
from tolerance import assert_near

from stepclock_ext import ClockedOptimizer

# Nothing at all, one value, a transposed matrix; the last ones are worth a call by themselves, and
# more than one chunk.
SIZES = [(), (3,), (0,), (4, 5), (70_001,)]
DECAY = 0.95


@dataclass(frozen=True)
class Micro:
    """A micro step: what it counts, and the fp64 gradient of each parameter that takes part."""

    weight: float
    grads: dict[int, torch.Tensor]


def make_params(dtypes):
    """Parameters of all `SIZES`, of the given dtypes in turn."""
    params = []
    for i, size in enumerate(SIZES):
        values = torch.ones(size, dtype=dtypes[i % len(dtypes)])
        params.append(torch.nn.Parameter(values.t() if len(size) == 2 else values))
    return params


def make_sgd(params, **options):
    options = {"gradient_accumulation_steps": 4, "noise_scale": True, **options}
    return ClockedOptimizer(torch.optim.SGD(params, lr=0.01), **options)


def exact_windows(params, num_windows, *, weights=(1, 1, 1, 1), takes_part=None, seed=0):
    """Windows of small whole gradients: their sums are exact in every dtype.

    `takes_part` has the indices of the parameters in each micro step; None is all of them. With
    it, the last and largest parameter is not louder than the others together: where it comes once
    in a window, the noise would be infinite.
    """
    generator = torch.Generator().manual_seed(seed)
    parts = takes_part or [range(len(params))] * len(weights)
    low, loudness = (-1, 1) if takes_part is None else (1, 64)

    def whole(i):
        values = torch.randint(low, 4, params[i].shape, generator=generator).double()
        return values if i + 1 == len(SIZES) else values * loudness

    return [
        [
            Micro(weight, {i: whole(i) for i in part})
            for weight, part in zip(weights, parts, strict=True)
        ]
        for _ in range(num_windows)
    ]


def micro_step(opt, params, micro):
    """Runs `micro`; with weight 0, its loss is NaN."""
    if micro.weight == 0:
        loss = torch.tensor(math.nan)
    elif micro.grads:
        loss = given(*((params[i], grad) for i, grad in micro.grads.items()))
    else:
        loss = given((torch.nn.Parameter(torch.ones(2)), [1.0, 1.0]))
    opt.backward(loss, weight=micro.weight)
    return opt.step()


def run(opt, params, windows):
    """What the last micro step of each window did; the others must say nothing."""
    infos = []
    for window in windows:
        *inside, last = [micro_step(opt, params, micro) for micro in window]
        assert [info.noise_scale for info in inside] == [None] * len(inside)
        infos.append(last)
    return infos


class Direct:
    """The estimates by their definition, from deviations: averaged trace and square, in fp64."""

    def __init__(self):
        self.trace = self.square = self.size = None

    def observe(self, window):
        """The noise scale after a window of micro steps, and what its errors are relative to."""
        used = [(micro.weight, micro.grads) for micro in window if micro.weight]
        rows = {i: grad for _, grads in used for i, grad in grads.items()}
        flat = [
            torch.cat([grads.get(i, torch.zeros_like(g)).flatten() for i, g in rows.items()])
            for _, grads in used
        ]
        weights = [weight for weight, _ in used]
        total = sum(weights)
        mean = sum(w * g for w, g in zip(weights, flat, strict=True)) / total
        spread = sum(w * _square(g - mean) for w, g in zip(weights, flat, strict=True))
        trace = spread / (len(used) - 1)
        sizes = sum(w * _square(g) for w, g in zip(weights, flat, strict=True))
        new = (trace, _square(mean) - trace / total, sizes / (len(used) - 1))
        if self.trace is not None:
            old = (self.trace, self.square, self.size)
            new = tuple(DECAY * was + (1 - DECAY) * now for was, now in zip(old, new, strict=True))
        self.trace, self.square, self.size = new
        if not self.square > 0:
            return math.inf, math.inf
        # Both numbers are differences of parts of `size`; so much larger are their own errors.
        ratio, size = self.trace / self.square, self.size
        return ratio, ratio * size * (1 / self.trace + 1 / self.square / total)


def _square(vector):
    return vector.square().sum().item()


def check(infos, windows, *, direct=None, dtype=torch.float64):
    """Every update says what the micro gradients say; `dtype` is that of inexact sums."""
    direct = direct or Direct()
    for info, window in zip(infos, windows, strict=True):
        assert info.updated
        value, size = direct.observe(window)
        assert math.isfinite(value)  # or else the window is no test
        assert_near(info.noise_scale, value, num_roundings=16, magnitude=size, dtype=dtype)
