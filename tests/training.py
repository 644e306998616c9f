"""A run of twelve micro steps with everything in it that a checkpoint must hold."""

import math

import torch

from stepclock_ext import ClockedOptimizer, LossScale

NUM_MICRO = 12  # three windows of four
BAD_MICRO = 5  # its window is skipped
END_OF_EPOCH = 7  # inside that window
SIZES = [(3,), (), (70_001,), (4, 5)]

MAKERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01, centered=True),
    "two optimizers": lambda params: [
        torch.optim.SGD(params[:2], lr=0.1, momentum=0.9),
        torch.optim.AdamW([{"params": params[2:3]}, {"params": params[3:], "lr": 0.3}]),
    ],
}


class Training:
    """A wrapper with a dynamic scale, two schedulers and a trigger; `seed` sets the parameters."""

    def __init__(self, make, *, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.params = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in SIZES]
        inner = make(self.params)
        first = inner[0] if isinstance(inner, list) else inner
        self.opt = ClockedOptimizer(
            inner,
            gradient_accumulation_steps=4,
            max_grad_norm=1.0,
            loss_scale=LossScale(init_scale=1024.0, growth_interval=1),
            schedulers=[torch.optim.lr_scheduler.StepLR(first, step_size=1, gamma=0.5)],
            tail="carry",
        )
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(first, patience=0, factor=0.1)
        self.opt.attach(self.plateau)
        self.reports = []

    def micro(self, number):
        """Micro step `number`, counted from 1, and what follows it."""
        generator = torch.Generator().manual_seed(number)
        inputs = [torch.randn(size, generator=generator) for size in SIZES]
        if number == BAD_MICRO:
            inputs[3][2, 2] = math.inf
        terms = [(p * x).sum() for p, x in zip(self.params, inputs, strict=True)]
        used = terms if number % 3 else terms[:3]  # the last one takes part in some only
        self.opt.backward(sum(used), weight=1 + number % 3)
        info = self.opt.step()
        if info.updated:
            self.opt.report_metric(1.0)
        due = self.opt.clock.due("eval", every=2)
        self.reports.append(f"{info} {due=} {self.opt.loss_scale}")  # a text: NaN is not NaN
        if number == END_OF_EPOCH:
            self.opt.end_epoch()

    def run(self, first=1, last=NUM_MICRO):
        for number in range(first, last + 1):
            self.micro(number)
        return self

    def values(self):
        """Copies of parameters and accumulators."""
        grads = [p.grad for p in self.params]
        return [t.detach().clone() for t in (*self.params, *grads) if t is not None]

    def checkpoint(self):
        return {"params": [p.detach() for p in self.params], "optimizer": self.opt.state_dict()}

    def resume(self, checkpoint):
        for p, saved in zip(self.params, checkpoint["params"], strict=True):
            p.data.copy_(saved)
        self.opt.load_state_dict(checkpoint["optimizer"])
