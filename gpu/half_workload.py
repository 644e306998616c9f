"""What is raced with 16 bits: bf16 parameters with remainders, and fp32 masters in plain PyTorch.

Bytes a parameter: ours 28 (reads parameter 2, remainder 2, sum 4, moments 8; writes 2, 2 and 8);
separate passes 54 (unscale 8, norm 4, clip 8, fused AdamW 28, copy down 6).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpu.workload import ADAM, LR, MAX_NORM, SCALE, normal_list
from stepclock_ext import ops

__all__ = ["HalfTraining", "OursHalf", "Separate"]


class HalfTraining:
    """bf16 parameters, their fp32 sums and moments: 18 bytes a parameter."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        self.sums = normal_list(sizes, device, seed=1, scale=SCALE)
        self.params = [torch.empty(n, dtype=torch.bfloat16, device=device) for n in sizes]
        self.exp_avgs, self.exp_avg_sqs = (
            [torch.zeros_like(total) for total in self.sums] for _ in range(2)
        )
        self.steps = [torch.zeros((), device=device) for _ in sizes]

    def values(self) -> list[Tensor]:
        """What the parameters are worth at the start."""
        return normal_list(self.sizes, self.device, seed=0)

    def reset(self) -> None:
        """Nothing has been updated yet; who updates sets the parameters."""
        for column in (self.exp_avgs, self.exp_avg_sqs, self.steps):
            torch._foreach_zero_(column)


class OursHalf:
    """The ops of an update with int16 remainders, on one backend."""

    def __init__(self, training: HalfTraining, remainders: list[Tensor], backend: str) -> None:
        self.training, self.remainders = training, remainders
        made = ops.make_backend(backend, training.device)
        self.layout = ops.Layout.of(made, training.params, accumulate_dtype=torch.float32)
        self.layout.adopt_state_dtypes(training.exp_avgs)
        self.states = ops.AdamStates(training.steps, training.exp_avgs, training.exp_avg_sqs, None)
        self.companions = ops.Companions(masters=remainders)
        self.slots = ops.make_slots(self.layout.num_slots, made.device)
        self.stats = ops.make_stats(made.device)
        ops.sum_squares_(self.slots, training.sums, self.layout)

    def reset(self) -> None:
        """Start values, taken apart row by row: `split` needs eight times their memory."""
        self.training.reset()
        rows = zip(self.training.params, self.remainders, self.training.values(), strict=True)
        for p, remainder, value in rows:
            half, rest = ops.split(value)
            p.copy_(half)
            remainder.copy_(rest)

    def prepare(self) -> None:
        """The sums are only read, and their norm is in the slots."""

    def update(self) -> None:
        """From sums whose norm is in the slots to updated parameters."""
        t = self.training
        ops.coefficient_(self.stats, self.slots, self.layout, divisor=SCALE, max_norm=MAX_NORM)
        ops.adam_(t.params, self.states, t.sums, self.stats, self.layout, ADAM, self.companions)

    def worth(self, row: int) -> Tensor:
        """A parameter in fp32."""
        return ops.join(self.training.params[row], self.remainders[row])


class Separate:
    """fp32 masters, and a pass of torch for each job."""

    def __init__(self, training: HalfTraining) -> None:
        self.training = training
        self.grads = [torch.zeros_like(total) for total in training.sums]
        self.masters = [value.requires_grad_() for value in training.values()]
        self.optimizer = torch.optim.AdamW(self.masters, lr=LR, fused=True)
        columns = zip(self.masters, training.exp_avgs, training.exp_avg_sqs, strict=True)
        for (master, exp_avg, exp_avg_sq), grad in zip(columns, self.grads, strict=True):
            master.grad = grad
            step = torch.zeros((), device=training.device)
            state = {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
            self.optimizer.state[master] = state

    def prepare(self) -> None:
        """The sums are gradients as they are."""
        torch._foreach_copy_(self.grads, self.training.sums)

    @torch.no_grad()
    def update(self) -> None:
        """From sums to updated masters and parameters."""
        torch._foreach_mul_(self.grads, 1.0 / SCALE)
        torch.nn.utils.clip_grad_norm_(self.masters, MAX_NORM, foreach=True)
        self.optimizer.step()
        torch._foreach_copy_(self.training.params, self.masters)
