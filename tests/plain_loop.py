"""The plain loop of PyTorch, and the same training by the wrapper.

Gradients, and what weight decay adds to them, have one sign for each element, so that nothing
cancels and every digit of a comparison counts. For Rprop, which watches the sign, windows flip it.
"""

import copy
from functools import lru_cache

import torch

from stepclock_ext import ClockedOptimizer

NUM_MICRO = 3
MAX_NORM = 1.0
# The last shape is large enough for the norm to ride on its last accumulation.
SHAPES = [(), (0,), (3,), (7, 5), (6, 11_000)]
WINDOWS = [1.0, 0.5, 0.8, 0.6]
FLIPPED = [1.0, -0.5, 0.8, -0.6]


def shapes_of(name):
    """What the optimizer of that name can train."""
    if name == "Muon":
        return SHAPES[3:]
    return [shape for shape in SHAPES if name != "Adafactor" or 0 not in shape]


@lru_cache
def gradients(name, dtype):
    """A gradient for each window, micro step and parameter."""
    return [
        [
            [window * signed(shape, dtype, seed=10 * u + micro) for shape in shapes_of(name)]
            for micro in range(NUM_MICRO)
        ]
        for u, window in enumerate(FLIPPED if name == "Rprop" else WINDOWS)
    ]


@lru_cache
def signed(shape, dtype, *, seed):
    """Values of magnitude 0.75 to 1.25, whose signs do not depend on the seed."""
    signs = torch.randn(shape, generator=torch.Generator().manual_seed(0)).sign()
    sizes = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    return signs.to(dtype) * (0.75 + sizes.to(dtype) / 2)


class Loop:
    """The plain loop: loss / 3, clip, step."""

    def __init__(self, name, kwargs, dtype):
        side = -0.5 if kwargs.get("maximize") else 0.5
        self.params = [
            torch.nn.Parameter(side * signed(shape, dtype, seed=1)) for shape in shapes_of(name)
        ]
        self.start = [p.detach().clone() for p in self.params]
        self.inner = getattr(torch.optim, name)(self.params, **copy.deepcopy(kwargs))
        self.gradients = gradients(name, dtype)

    def losses(self, window):
        for inputs in self.gradients[window]:
            yield sum((p * x).sum() for p, x in zip(self.params, inputs, strict=True))

    def run(self, window):
        for loss in self.losses(window):
            (loss / NUM_MICRO).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.params, MAX_NORM)
        assert norm > MAX_NORM
        self.inner.step()
        self.inner.zero_grad()

    def halve_lr(self):
        for group in self.inner.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].mul_(0.5)
            else:
                group["lr"] *= 0.5

    def copy_params(self, other):
        """Continues where `other` is."""
        for p, q in zip(self.params, other.params, strict=True):
            p.data.copy_(q.data)

    def state_dict(self):
        return self.inner.state_dict()

    def load(self, other):
        self.copy_params(other)
        self.inner.load_state_dict(copy.deepcopy(other.state_dict()))


class Wrapped(Loop):
    """The same by the wrapper."""

    def __init__(self, name, kwargs, dtype, backend="auto", **options):
        super().__init__(name, kwargs, dtype)
        options = {"gradient_accumulation_steps": NUM_MICRO, "max_grad_norm": MAX_NORM, **options}
        self.opt = ClockedOptimizer(self.inner, backend=backend, **options)

    def run(self, window):
        for loss in self.losses(window):
            self.opt.backward(loss)
            info = self.opt.step()
        assert info.updated
        assert info.grad_norm > MAX_NORM > info.clipped_norm

    def state_dict(self):
        return self.opt.state_dict()

    def load(self, other):
        self.copy_params(other)
        self.opt.load_state_dict(copy.deepcopy(other.state_dict()))
