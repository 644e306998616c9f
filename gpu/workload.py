"""What is raced: parameters with gradients and moments, updated by us and by plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stepclock_ext import ClockedOptimizer, ops

__all__ = [
    "ADAM",
    "LR",
    "MAX_NORM",
    "SCALE",
    "Contender",
    "Ours",
    "Plain",
    "Training",
    "Wrapped",
    "given_loss",
    "normal_list",
]

SCALE = 65536.0
MAX_NORM = 1.0  # gradients are standard normal, so the clip binds
LR = 1e-4
# torch.optim.AdamW's defaults but for the rate.
ADAM = ops.AdamScalars(
    lr=LR,
    beta1=0.9,
    beta2=0.999,
    eps=1e-8,
    weight_decay=0.01,
    decoupled=True,
    amsgrad=False,
    maximize=False,
)


class _GivenGradient(torch.autograd.Function):
    """A loss whose gradients are given: what backward costs is not what is measured."""

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor], *params: Tensor) -> Tensor:
        ctx.grads = grads
        return params[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, seed: Tensor) -> Any:
        return (None, *(grad * seed for grad in ctx.grads))


def given_loss(params: Sequence[Tensor], grads: list[Tensor]) -> Tensor:
    """A scalar whose gradient with respect to `params` is `grads`."""
    return _GivenGradient.apply(grads, *params)  # type: ignore[no-any-return]


def normal_list(
    sizes: Sequence[int], device: torch.device, *, seed: int, scale: float = 1.0
) -> list[Tensor]:
    """Normal fp32 values, equal for equal seeds, made where they are used."""
    generator = torch.Generator(device).manual_seed(seed)
    return [torch.randn(n, generator=generator, device=device).mul_(scale) for n in sizes]


class Training:
    """fp32 parameters, their window sums and moments: 24 bytes a parameter.

    Attributes:
        source: scaled gradients that stay as they are.
        sums: the window's, which plain PyTorch unscales and clips in place.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        starts = normal_list(sizes, device, seed=0)
        self.params = [start.requires_grad_() for start in starts]
        self.source = normal_list(sizes, device, seed=1, scale=SCALE)
        self.sums, self.exp_avgs, self.exp_avg_sqs = (
            [torch.zeros_like(g) for g in self.source] for _ in range(3)
        )
        self.steps = [torch.zeros((), device=device) for _ in sizes]
        for p, total in zip(self.params, self.sums, strict=True):
            p.grad = total

    @torch.no_grad()
    def reset(self) -> None:
        """As it was made, with a window that is complete."""
        generator = torch.Generator(self.device).manual_seed(0)
        for p in self.params:
            p.normal_(generator=generator)
        for column in (self.exp_avgs, self.exp_avg_sqs, self.steps):
            torch._foreach_zero_(column)
        self.refill()

    @torch.no_grad()
    def refill(self) -> None:
        """A window that is complete."""
        torch._foreach_copy_(self.sums, self.source)


class Ours:
    """The ops of an update on one backend.

    Args:
        training: what is updated.
        backend: its name.
        is_summed: the norm rode on the last accumulation; else the update begins with a read pass.
    """

    def __init__(self, training: Training, backend: str, *, is_summed: bool) -> None:
        self.training, self.is_summed = training, is_summed
        self.params = [p.detach() for p in training.params]
        made = ops.make_backend(backend, training.device)
        self.layout = ops.Layout.of(made, self.params)
        self.states = ops.AdamStates(training.steps, training.exp_avgs, training.exp_avg_sqs, None)
        self.slots = ops.make_slots(self.layout.num_slots, made.device)
        self.stats = ops.make_stats(made.device)

    def prepare(self) -> None:
        """Sums complete, their chunk sums in the slots if they rode along."""
        self.training.refill()
        if self.is_summed:
            ops.sum_squares_(self.slots, self.training.sums, self.layout)

    def update(self) -> None:
        """From complete sums to updated parameters."""
        sums = self.training.sums
        if not self.is_summed:
            ops.sum_squares_(self.slots, sums, self.layout)
        ops.coefficient_(self.stats, self.slots, self.layout, divisor=SCALE, max_norm=MAX_NORM)
        ops.adam_(self.params, self.states, sums, self.stats, self.layout, ADAM)


class Plain:
    """GradScaler's unscale, ``clip_grad_norm_(foreach=True)``, AdamW; 48 bytes a parameter.

    Without GradScaler's own read of the host, so in plain PyTorch's favour.

    Args:
        training: what is updated; the moments are shared with us.
        way: "fused" or "foreach".
    """

    def __init__(self, training: Training, way: str) -> None:
        self.training = training
        chosen: dict[str, Any] = {way: True}
        self.optimizer = torch.optim.AdamW(training.params, lr=LR, **chosen)
        # foreach counts on the host.
        device = training.device if way == "fused" else torch.device("cpu")
        columns = zip(training.params, training.exp_avgs, training.exp_avg_sqs, strict=True)
        for p, exp_avg, exp_avg_sq in columns:
            step = torch.zeros((), device=device)
            state = {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
            self.optimizer.state[p] = state
        self.found_inf = torch.zeros((), device=training.device)
        self.inverse = torch.full((), 1.0 / SCALE, device=training.device)

    def prepare(self) -> None:
        """Gradients complete: the scaled sum of the window."""
        self.training.refill()

    def update(self) -> None:
        """From complete gradients to updated parameters."""
        sums = self.training.sums
        torch._amp_foreach_non_finite_check_and_unscale_(sums, self.found_inf, self.inverse)
        torch.nn.utils.clip_grad_norm_(self.training.params, MAX_NORM, foreach=True)
        self.optimizer.step()


class Wrapped:
    """ClockedOptimizer itself: ``step()`` of a window of one, with all that it does on the host."""

    def __init__(self, training: Training, backend: str) -> None:
        self.training = training
        self.params = [torch.nn.Parameter(p.detach().clone()) for p in training.params]
        self.optimizer = ClockedOptimizer(
            torch.optim.AdamW(self.params, lr=LR), max_grad_norm=MAX_NORM, backend=backend
        )

    def prepare(self) -> None:
        """One backward."""
        self.optimizer.backward(given_loss(self.params, self.training.source))

    def update(self) -> None:
        """From complete gradients to updated parameters and no gradients."""
        self.optimizer.step()


Contender = Ours | Plain
