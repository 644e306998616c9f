"""Whole runs of the wrapper on a device, against the same runs on the CPU by the specification."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from tolerance import assert_all_bit_equal, assert_close, assert_near
from torch import Tensor

from gpu.setting import Found, Setting, run_each
from gpu.workload import given_loss
from stepclock_ext import EMA, ClockedOptimizer, LossScale

__all__ = ["run"]

SHAPES = [(), (3,), (70_001,), (257, 129)]
WINDOWS, MICRO_STEPS = 12, 3
BAD_WINDOW = 5  # one of its gradients is infinite: it must skip
RESUMED_WINDOW = 7
NUM_ROUNDINGS = 32 * WINDOWS
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """How a run trains."""

    dtype: torch.dtype
    make: Any
    loss_scale: float | None = None
    master_weights: bool = False
    averaged: bool = False


ADAMW = partial(torch.optim.AdamW, lr=0.01, eps=1e-3, weight_decay=0.1)
CASES = {
    "fp32": Case(torch.float32, ADAMW),
    "bf16 with masters and EMA": Case(torch.bfloat16, ADAMW, master_weights=True, averaged=True),
    "fp16 with a loss scale": Case(
        torch.float16,
        partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
        loss_scale=8.0,
        master_weights=True,
    ),
}


@dataclass
class Ended:
    """Where a run stands: tensors on the CPU, and what it counted and reported."""

    values: list[Tensor]
    params: list[Tensor]
    infos: list[tuple[Any, ...]]
    norms: list[float]


def run(setting: Setting) -> Found:
    """Every case, on the backend and on the specification."""
    checks = {name: partial(check_case, setting, case) for name, case in CASES.items()}
    return run_each(setting, checks)


def check_case(setting: Setting, case: Case) -> None:
    """As the specification; the same bits twice, and when it is saved and loaded on the way."""
    train = partial(train_case, case, setting.backend, setting.device.torch)
    ended, again, resumed = train(), train(), train(resumed=True)
    assert_all_bit_equal(again.values, ended.values)
    assert_all_bit_equal(resumed.values, ended.values)
    expected = train_case(case, "reference", CPU)
    assert ended.infos == expected.infos == resumed.infos, (ended.infos, expected.infos)
    for norm, wanted in zip(ended.norms, expected.norms, strict=True):
        assert_near(norm, wanted, num_roundings=NUM_ROUNDINGS, dtype=torch.float32)
    for got, want in zip(ended.values, expected.values, strict=True):
        assert_close(got, want, num_roundings=NUM_ROUNDINGS, magnitude=1.0)
    for got, want in zip(ended.params, expected.params, strict=True):
        assert_close(got, want, num_roundings=1, magnitude=1.0)


def train_case(case: Case, backend: str, device: torch.device, *, resumed: bool = False) -> Ended:
    """Twelve windows of three micro steps, one of which skips."""
    params = [
        _random(shape, seed).to(device, case.dtype, copy=True) for seed, shape in enumerate(SHAPES)
    ]
    leaves = [torch.nn.Parameter(p) for p in params]
    opt, ema = make_optimizer(case, leaves, backend)
    infos, norms = [], []
    for window in range(WINDOWS):
        if resumed and window == RESUMED_WINDOW:
            state = copy.deepcopy(opt.state_dict())
            leaves = [torch.nn.Parameter(p.detach().clone()) for p in leaves]
            opt, ema = make_optimizer(case, leaves, backend)
            opt.load_state_dict(state)
        for micro in range(MICRO_STEPS):
            grads = _gradients(window, micro, case.dtype, device)
            opt.backward(given_loss(leaves, grads), weight=1.0 + micro)
            info = opt.step()
        infos.append((info.updated, info.skipped, info.micro_step, info.update_step))
        assert info.skipped == (window == BAD_WINDOW), info
        if info.updated:
            norms.append(float(info.grad_norm or 0.0))
    values = [opt.master_weight(p) for p in leaves]
    for p in leaves:
        state = opt.state[p]
        values += [torch.as_tensor(state[key]) for key in sorted(state)]
        values += [] if ema is None else [ema.average(p)]
    home = [v.detach().to(CPU, torch.float32) for v in values]
    return Ended(home, [p.detach().to(CPU) for p in leaves], infos, norms)


def make_optimizer(
    case: Case, leaves: list[torch.nn.Parameter], backend: str
) -> tuple[ClockedOptimizer, EMA | None]:
    """The wrapper of a case, and its average."""
    ema = EMA(decay=0.9) if case.averaged else None
    scale = None if case.loss_scale is None else LossScale(init_scale=case.loss_scale)
    opt = ClockedOptimizer(
        case.make(leaves),
        gradient_accumulation_steps=MICRO_STEPS,
        max_grad_norm=1.0,
        loss_scale=scale,
        master_weights=case.master_weights,
        ema=ema,
        backend=backend,
    )
    return opt, ema


@cache
def _random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _gradients(window: int, micro: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    first = 100 + len(SHAPES) * (MICRO_STEPS * window + micro)
    grads = [_random(shape, first + row).to(dtype, copy=True) for row, shape in enumerate(SHAPES)]
    if window == BAD_WINDOW and micro == 1:
        grads[2][70_000] = torch.inf
    return [grad.to(device) for grad in grads]
