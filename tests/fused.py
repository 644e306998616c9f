"""Rows of parameters with sums, states and companions, and the fused updates run on them."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from tensors import HALVES, clones, coefficient_stats, random_list, square_list

from stepclock_ext import ops

COEFFICIENT = 0.37
ADAM = dict(lr=0.01, beta1=0.9, beta2=0.99, eps=1e-3)
PLAIN_ADAM = dict(decoupled=True, amsgrad=False, maximize=False, weight_decay=0.0)
PLAIN_SGD = dict(
    lr=0.01, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, maximize=False
)
# Of each fp32 number's lower 16 bits: none, one, around a tie, all, and some in between.
LOW_BITS = [0, 1, 2, 0x1FFF, 0x2000, 0x3A7C, 0x7FFF, 0x8000, 0x8001, 0xC0DE, 0xE000, 0xFFFF]


@dataclass
class Rows:
    """What an update of some parameters reads and writes."""

    layout: ops.Layout
    params: list
    sums: list
    moments: list
    buffers: list
    steps: list
    masters: list | None = None
    averages: list | None = None

    def companions(self, *, average_weight=0.0, rounding_key=None):
        return ops.Companions(
            masters=self.masters,
            averages=self.averages,
            average_weight=average_weight,
            rounding_key=rounding_key,
        )

    def written(self):
        """Every tensor that an update may write."""
        lists = [*self.moments, self.buffers, self.steps, self.masters, self.averages]
        return [*self.params, *(t for tensors in lists for t in tensors or [])]


def make_rows(backend, sizes, dtype, *, sums=None, state=None, unaligned=False, like=None):
    """Rows of random values; those of another dtype are the same ones, rounded.

    Second moments stay away from zero, where they would magnify the rounding of a gradient.

    Args:
        backend: its name.
        sizes: of the parameters.
        dtype: of the parameters.
        sums: dtype of the sums; that of the parameters unless given.
        state: dtype of moments and buffer; that of the parameters unless given.
        unaligned: every second column begins one element into its memory.
        like: a function of each tensor, to give it other strides.
    """
    sums, state = sums or dtype, state or dtype
    columns = [
        make(sizes, kind, seed=seed, unaligned=unaligned and seed % 2 == 0)
        for seed, (make, kind) in enumerate(
            [
                (random_list, dtype),
                (random_list, sums),
                (random_list, state),
                (square_list, state),
                (square_list, state),
                (random_list, state),
            ]
        )
    ]
    for tensor in [*columns[3], *columns[4]]:
        ops.real_view(tensor).add_(0.1)
    if like is not None:
        columns = [[like(t) for t in tensors] for tensors in columns]
    wide = sums if sums != dtype else None
    layout = ops.Layout.of(ops.make_backend(backend), columns[0], accumulate_dtype=wide)
    layout.adopt_state_dtypes(columns[2])
    steps = [torch.tensor(float(row % 3)) for row in range(len(sizes))]
    return Rows(layout, columns[0], columns[1], columns[2:5], columns[5], steps)


def exact_params(params):
    """fp32 values that 16-bit parameters round, with bits below theirs; others are their own."""
    exact = [p.float() if p.dtype in HALVES else p.clone() for p in params]
    for p, x in zip(params, exact, strict=True):
        if p.dtype in HALVES:
            x *= 1 + torch.finfo(p.dtype).eps / 3
    return exact


def add_masters(rows, exact):
    """Makes `exact` what the parameters of `rows` are worth."""
    rows.masters = []
    for p, x in zip(rows.params, exact, strict=True):
        value, master = ops.split(x) if p.dtype == torch.bfloat16 else (x, x)
        p.copy_(value)
        rows.masters.append(torch.empty_like(p, dtype=master.dtype).copy_(master))


def add_averages(rows):
    """Averages that are not the parameters."""
    rows.averages = [p.float() if p.dtype in HALVES else p.clone() for p in rows.params]
    for average in rows.averages:
        ops.real_view(average).mul_(0.7).add_(0.1)


def worth(rows):
    """What each parameter is worth: its master, or else itself, in the dtype of its average."""
    if rows.masters is None:
        return [p.float() if p.dtype in HALVES else p.clone() for p in rows.params]
    return [
        ops.join(p, m) if p.dtype == torch.bfloat16 else (m if p.dtype in HALVES else p).clone()
        for p, m in zip(rows.params, rows.masters, strict=True)
    ]


def adam(rows, flags=PLAIN_ADAM, **companions):
    """One update of Adam."""
    maxima = rows.moments[2] if flags["amsgrad"] else None
    states = ops.AdamStates(rows.steps, rows.moments[0], rows.moments[1], maxima)
    scalars = ops.AdamScalars(**ADAM, **flags)
    stats, along = coefficient_stats(COEFFICIENT), rows.companions(**companions)
    ops.adam_(rows.params, states, rows.sums, stats, rows.layout, scalars, along)


def sgd(rows, flags=PLAIN_SGD, *, first=False, coefficient=COEFFICIENT, **companions):
    """One update of SGD."""
    buffers = rows.buffers if flags["momentum"] else None
    scalars = ops.SgdScalars(first=first, **flags)
    stats, along = coefficient_stats(coefficient), rows.companions(**companions)
    ops.sgd_(rows.params, buffers, rows.sums, stats, rows.layout, scalars, along)


def momentum_sgd(rows, **companions):
    """One update of SGD with a Nesterov momentum and decay."""
    flags = {**PLAIN_SGD, "momentum": 0.9, "weight_decay": 0.3, "nesterov": True}
    sgd(rows, flags, **companions)


def move_average(rows, **companions):
    """Moves the averages and nothing else."""
    along = rows.companions(**companions)
    ops.move_average_(rows.params, ops.make_stats(), rows.layout, along)


UPDATES = {"adam": adam, "sgd": sgd, "momentum": momentum_sgd}


def in_every_way(run):
    """What `run` returns on each instruction set with one thread and with two, as copies."""
    from stepclock_ext import _C

    isa, threads, results = _C.isa(), torch.get_num_threads(), []
    try:
        for name in _C.available_isas():
            _C.use_isa(name)
            for number in (1, 2):
                torch.set_num_threads(number)
                results.append(clones(run()))
    finally:
        _C.use_isa(isa)
        torch.set_num_threads(threads)
    return results


@lru_cache(maxsize=1)
def every_upper_half():
    """fp32 numbers of all 65536 upper halves with each of `LOW_BITS`."""
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int64) * 2**16
    patterns = (upper[None, :] + torch.tensor(LOW_BITS)[:, None]).flatten()
    return patterns.to(torch.int32).view(torch.float32)


def neighbours(values, dtype):
    """The numbers of `dtype` next to each finite value, or itself, fp64: from below, from above.

    Infinity stands where the next number would be: at 2**128 for bf16, at 2**16 for fp16.
    """
    table = _numbers(dtype)
    wide = values.to(torch.float64)
    below = torch.searchsorted(table, wide, right=True) - 1
    above = torch.searchsorted(table, wide)
    return table[below.clamp(min=0)], table[above.clamp(max=len(table) - 1)]


@lru_cache(maxsize=2)
def _numbers(dtype):
    """Every number of a 16-bit dtype in order, fp64, infinity where the next one would be."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = patterns[patterns.isfinite()].to(torch.float64)
    over = 2.0 ** torch.tensor(torch.finfo(dtype).max, dtype=torch.float64).log2().ceil()
    return torch.cat([finite, torch.stack([over, -over])]).unique()
