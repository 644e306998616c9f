"""Training of 16-bit parameters, and the same training in fp32, from the same 16-bit gradients."""

import io
from functools import lru_cache, partial

import pytest
import torch
from tensors import HALVES, dtype_name

from stepclock_ext import ClockedOptimizer

each_half = pytest.mark.parametrize("dtype", HALVES, ids=dtype_name)

# One element, a few, two dimensions, and enough for the norm to ride on the last micro step.
SHAPES = [(), (3,), (5, 7), (70_001,)]
NUM_PATTERNS = 7

MAKERS = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1),
    "Adam amsgrad": partial(torch.optim.Adam, lr=1e-3, weight_decay=0.1, amsgrad=True),
    "SGD": partial(torch.optim.SGD, lr=1e-3),
    "SGD nesterov": partial(
        torch.optim.SGD, lr=1e-3, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
}
each_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx, param, grad):
        ctx.grad, ctx.dtype = grad, param.dtype
        return torch.zeros(())

    @staticmethod
    def backward(ctx, seed):
        return (ctx.grad * seed.to(ctx.grad.dtype)).to(ctx.dtype), None


def given(*pairs):
    """A loss whose gradients are those beside the parameters, rounded to the gradients' dtype."""
    return sum(_Given.apply(p, grad) for p, grad in pairs)


@lru_cache
def _values(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def start_params(dtype, *, as_dtype=None, shapes=SHAPES, seed=100):
    """Parameters that `dtype` can hold, in it or in another."""
    values = [_values(shape, dtype, seed + i) for i, shape in enumerate(shapes)]
    return [torch.nn.Parameter(v.to(as_dtype or dtype, copy=True)) for v in values]


def micro_step(opt, params, number, *, dtype, bad=False):
    """Micro step `number`, from 1: gradients of `dtype`; the first parameter rests at times."""
    pairs = [(p, _values(tuple(p.shape), dtype, number % NUM_PATTERNS)) for p in params]
    if bad:
        pairs[-1] = (params[-1], torch.full_like(pairs[-1][1], torch.inf))
    if (number - 1) // 3 % 4 == 2:  # in every fourth window of three
        del pairs[0]
    opt.backward(given(*pairs), weight=1 + number % 3)
    return opt.step()


class Twins:
    """A run of 16-bit parameters with masters, and the fp32 run that it must equal."""

    def __init__(self, make, dtype, backend, *, steps=3, shapes=SHAPES, masters=True, **options):
        self.dtype = dtype
        self.params = start_params(dtype, shapes=shapes)
        self.wide = start_params(dtype, as_dtype=torch.float32, shapes=shapes)
        options = {"gradient_accumulation_steps": steps, "max_grad_norm": 1.0, **options}
        self.opt = ClockedOptimizer(
            make(self.params), backend=backend, master_weights=masters, **options
        )
        self.wide_opt = ClockedOptimizer(make(self.wide), backend=backend, **options)
        self.number = 0

    def micro(self, *, bad=False):
        self.number += 1
        info = micro_step(self.opt, self.params, self.number, dtype=self.dtype, bad=bad)
        other = micro_step(self.wide_opt, self.wide, self.number, dtype=self.dtype, bad=bad)
        assert str(info) == str(other)  # the norm as well
        return info

    def run(self, num_updates):
        goal = self.opt.clock.update_step + num_updates
        while self.opt.clock.update_step < goal:
            self.micro()
        return self

    def write(self, write_):
        """Writes the 16-bit parameters from outside, and gives the fp32 ones what was written."""
        with torch.no_grad():
            for p, q in zip(self.params, self.wide, strict=True):
                write_(p)
                q.copy_(p)

    def masters(self):
        return [self.opt.master_weight(p) for p in self.params]

    def wide_values(self):
        return [q.detach() for q in self.wide]


def nearest(values, dtype):
    """fp32 values rounded to `dtype`: bf16 ties go away from zero, fp16 ties to even."""
    if dtype == torch.float16:
        return values.detach().to(dtype)
    toward_zero = values.detach().contiguous().view(torch.int32) & ~0xFFFF
    below = toward_zero.view(torch.float32).double()
    above = (toward_zero + 0x10000).view(torch.float32).double()
    exact = values.detach().double()
    return torch.where((above - exact).abs() <= (exact - below).abs(), above, below).to(dtype)


def through_a_file(state):
    """What ``torch.load(weights_only=True)`` makes of it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
