"""What is timed: parameters, their gradients, the plain PyTorch loops and ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from interleave import Rival
from torch import Tensor

from stepclock_ext import ClockedOptimizer, LossScale, ops

__all__ = [
    "ADAM_SCALARS",
    "MAX_NORM",
    "SCALE",
    "OursLoop",
    "PlainLoop",
    "make_gradients",
    "make_parameters",
]

SCALE = 65536.0
MAX_NORM = 1.0  # gradients are standard normal, so the clip binds
MICRO_STEPS = 2
# The loops' AdamW, for kernels that are called directly.
ADAM_SCALARS = ops.AdamScalars(
    lr=1e-4,
    beta1=0.9,
    beta2=0.999,
    eps=1e-8,
    weight_decay=0.01,
    decoupled=True,
    amsgrad=False,
    maximize=False,
)


def make_parameters(num_tensors: int, num_elements: int, seed: int = 0) -> list[torch.nn.Parameter]:
    """Equal parameters for equal seeds."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(num_elements, generator=generator))
        for _ in range(num_tensors)
    ]


def make_gradients(params: list[torch.nn.Parameter], seed: int = 1) -> list[Tensor]:
    """One micro-batch's gradient for each parameter, unscaled."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator) for p in params]


class _GivenGradient(torch.autograd.Function):
    """A loss whose gradients are given: what backward costs is not what is measured."""

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor], *params: Tensor) -> Tensor:  # type: ignore[override]
        ctx.grads = grads
        return params[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, seed: Tensor) -> Any:  # type: ignore[override]
        return (None, *(grad * seed for grad in ctx.grads))


def given_loss(params: list[torch.nn.Parameter], grads: list[Tensor]) -> Tensor:
    """A scalar whose gradient with respect to `params` is `grads`."""
    return _GivenGradient.apply(grads, *params)  # type: ignore[no-any-return]


class PlainLoop:
    """CPU GradScaler's unscale, ``clip_grad_norm_(foreach=True)``, AdamW; 48 bytes a parameter."""

    def __init__(self, params: list[torch.nn.Parameter], grads: list[Tensor], *, fused: bool):
        self.params = params
        self.grads = grads
        self.optimizer = torch.optim.AdamW(params, lr=1e-4, fused=fused)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        self.scaler.scale(torch.ones(()))  # the scale's tensor is made by its first use

    def prepare(self) -> None:
        """Gradients complete: the scaled mean of the window."""
        for p, grad in zip(self.params, self.grads, strict=True):
            p.grad = grad * SCALE

    def prepare_last_micro_step(self) -> None:
        """All but the last micro step are in; its gradients lie ready."""
        self.prepare()
        self.fresh = [grad * SCALE for grad in self.grads]

    def accumulate_and_update(self) -> None:
        """What autograd does with the last gradients, then the update."""
        for p, grad in zip(self.params, self.fresh, strict=True):
            assert p.grad is not None
            p.grad += grad
        del self.fresh
        self.update()

    def update(self) -> None:
        """From complete gradients to updated parameters and no gradients."""
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.params, MAX_NORM, foreach=True)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


class OursLoop:
    """ClockedOptimizer over the same parameters and gradients."""

    def __init__(self, params: list[torch.nn.Parameter], grads: list[Tensor], *, micro_steps: int):
        self.params = params
        self.grads = [grad / 1.0 for grad in grads]
        self.optimizer = ClockedOptimizer(
            torch.optim.AdamW(params, lr=1e-4),
            gradient_accumulation_steps=micro_steps,
            max_grad_norm=MAX_NORM,
            loss_scale=LossScale(init_scale=SCALE),
        )
        self.micro_steps = micro_steps
        self._hooks: list[tuple[Callable[[Tensor], None], torch.nn.Parameter]] = []

    def prepare(self) -> None:
        """Every micro step but the last ``step()``."""
        for micro in range(self.micro_steps):
            self.optimizer.backward(given_loss(self.params, self.grads))
            if micro + 1 < self.micro_steps:
                self.optimizer.step()

    def update(self) -> None:
        """From complete gradients to updated parameters and no gradients."""
        info = self.optimizer.step()
        assert info.updated

    def prepare_last_micro_step(self) -> None:
        """As `PlainLoop.prepare_last_micro_step`: accumulators set aside, fresh gradients ready."""
        self.optimizer.discard()
        for _ in range(self.micro_steps - 1):
            self.optimizer.backward(given_loss(self.params, self.grads))
            self.optimizer.step()
        accumulator = self.optimizer._pass.accumulator
        self._hooks = []
        for row, p in enumerate(self.params):
            assert p.grad is not None
            self._hooks.append((accumulator.ride.hook(row, p.grad), p))
            p.grad = self.grads[row] * SCALE

    def accumulate_and_update(self) -> None:
        """The hooks that autograd would call, then the update."""
        for hook, p in self._hooks:
            hook(p)
        window = self.optimizer._window
        window.is_pending = True
        window.add_weight(1.0)
        self.update()


def update_rival(name: str, loop: PlainLoop | OursLoop, moved_bytes: int) -> Rival:
    """The update stretch of a loop."""
    return Rival(name, loop.prepare, loop.update, moved_bytes)


def last_micro_step_rival(name: str, loop: PlainLoop | OursLoop, moved_bytes: int) -> Rival:
    """The last accumulation and the update of a loop."""
    return Rival(name, loop.prepare_last_micro_step, loop.accumulate_and_update, moved_bytes)
