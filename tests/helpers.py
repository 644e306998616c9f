"""What the test files share: parameters, exact gradients, micro steps."""

from functools import partial

import pytest
import tolerance
import torch
from tensors import BACKENDS

from stepclock_ext import ClockedOptimizer

each_backend = pytest.mark.parametrize("backend", BACKENDS)

# Nothing rides below 64 Ki elements: the last micro step's pass takes another way above.
SIZES = [(), (3,), (70_001,)]

_ADAM = {"lr": 0.1, "weight_decay": 0.1}
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd_nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "sgd_fused": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "adam": partial(torch.optim.Adam, **_ADAM),
    "adam_amsgrad": partial(torch.optim.Adam, amsgrad=True, **_ADAM),
    "adamw": partial(torch.optim.AdamW, **_ADAM),
    "adamw_fused": partial(torch.optim.AdamW, fused=True, **_ADAM),
    "adamw_foreach": partial(torch.optim.AdamW, foreach=True, **_ADAM),
    "adagrad": partial(torch.optim.Adagrad, **_ADAM),
    "adagrad_fused": partial(torch.optim.Adagrad, fused=True, **_ADAM),
    "adadelta": partial(torch.optim.Adadelta, weight_decay=0.1),
    "adamax": partial(torch.optim.Adamax, **_ADAM),
    "asgd": partial(torch.optim.ASGD, **_ADAM),
    "nadam": partial(torch.optim.NAdam, **_ADAM),
    "radam": partial(torch.optim.RAdam, **_ADAM),
    "rmsprop": partial(torch.optim.RMSprop, momentum=0.9, **_ADAM),
    "rprop": partial(torch.optim.Rprop, lr=0.1),
}
each_optimizer = pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)


def parameter(*values, dtype=torch.float32):
    """A leaf of these values; of one value, 0-dim."""
    return torch.nn.Parameter(torch.tensor(values[0] if len(values) == 1 else values, dtype=dtype))


def clocked_sgd(*params, lr=1.0, momentum=0.0, **options):
    """SGD with lr 1 under a clock: a parameter moves by minus the gradient it is handed."""
    return ClockedOptimizer(torch.optim.SGD(params, lr=lr, momentum=momentum), **options)


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx, param, grad):
        ctx.grad = grad
        return torch.zeros(())

    @staticmethod
    def backward(ctx, seed):
        return ctx.grad * seed.to(ctx.grad.dtype), None


def given(*pairs):
    """A loss of value 0 under which each parameter's gradient is exactly the one beside it."""
    return sum(_Given.apply(p, torch.as_tensor(grad, dtype=p.dtype)) for p, grad in pairs)


def run_micro_steps(opt, w, slopes, weights=None):
    """A micro step for each slope c, of loss ``c * mean(w)``; what the last one did."""
    info = None
    for c, weight in zip(slopes, weights or [1] * len(slopes), strict=True):
        opt.backward(c * w.mean(), weight=weight)
        info = opt.step()
    return info


def clip_factor(norm, max_norm):
    """torch's clip: the norm is made a little larger, so that 0 divides nothing."""
    return min(1.0, max_norm / (norm + 1e-6))


def assert_close(actual, expected, *, num_roundings=4):
    """`tolerance.assert_close`, where either may be a number; rounded as `actual` is."""
    actual = torch.as_tensor(actual, dtype=torch.float64 if isinstance(actual, float) else None)
    if not isinstance(expected, torch.Tensor):
        expected = torch.tensor(expected, dtype=_wide(actual.dtype))
    tolerance.assert_close(actual, expected, num_roundings=num_roundings)


def _wide(dtype):
    return torch.complex128 if dtype.is_complex else torch.float64


def snapshot(opt):
    """Copies of every parameter and every value of the inner state, in order."""
    values = [p.detach().clone() for group in opt.param_groups for p in group["params"]]
    for group in opt.param_groups:
        for p in group["params"]:
            state = opt.state.get(p, {})
            values += [torch.as_tensor(state[key]).clone() for key in sorted(state)]
    return values


def counters(clock):
    """What a clock counts, by name."""
    names = ("micro_step", "update_step", "skipped_updates", "epoch")
    return {name: getattr(clock, name) for name in (*names, "micro_step_in_epoch", "weight_seen")}
