"""A run of twelve micro steps of 16-bit parameters, with everything that is kept beside them."""

import torch
from sixteen_bit import MAKERS, micro_step, start_params

from stepclock_ext import EMA, ClockedOptimizer

NUM_MICRO = 12  # four windows of three
BAD_MICRO = 5  # its window is skipped
SHAPES = [(3,), (), (17_001,), (4, 5)]


def two_optimizers(params):
    return [MAKERS["SGD nesterov"](params[:2]), MAKERS["AdamW"](params[2:])]


KINDS = {
    "bf16 masters": {"master_weights": True},
    "fp16 masters": {"dtype": torch.float16, "master_weights": True},
    "averages": {"averages": True},
    "masters and averages": {"master_weights": True, "averages": True},
    "stochastic": {"rounding": "stochastic"},
    "stochastic and averages": {"rounding": "stochastic", "averages": True},
    "noise scale": {"noise_scale": True},
    "all of it": {"master_weights": True, "averages": True, "noise_scale": True},
    "two optimizers": {"make": two_optimizers, "master_weights": True, "averages": True},
}


class HalfTraining:
    """`seed` sets the parameters, and what stochastic rounding would start from."""

    def __init__(
        self, *, dtype=torch.bfloat16, make=MAKERS["AdamW"], averages=False, seed=0, **options
    ):
        self.dtype = dtype
        self.params = start_params(dtype, shapes=SHAPES, seed=100 + 10 * seed)
        self.model = torch.nn.ParameterList(self.params)
        torch.manual_seed(seed)
        self.ema = EMA(decay=0.9, warmup=True) if averages else None
        self.opt = ClockedOptimizer(
            make(self.params),
            gradient_accumulation_steps=3,
            max_grad_norm=1.0,
            ema=self.ema,
            **options,
        )
        self.reports = []

    def run(self, first=1, last=NUM_MICRO):
        for number in range(first, last + 1):
            info = micro_step(
                self.opt, self.params, number, dtype=self.dtype, bad=number == BAD_MICRO
            )
            self.reports.append(str(info))  # a text: NaN is not NaN
        return self

    def values(self):
        """Copies of parameters, what they are worth, averages and sums."""
        masters = [self.opt.master_weight(p) for p in self.params]
        averages = [] if self.ema is None else [self.ema.average(p) for p in self.params]
        sums = [self.opt.accumulated(p) for p in self.params]
        tensors = [*self.params, *masters, *averages, *(t for t in sums if t is not None)]
        return [t.detach().clone() for t in tensors]

    def checkpoint(self):
        return {"model": self.model.state_dict(), "optimizer": self.opt.state_dict()}

    def resume(self, checkpoint):
        self.model.load_state_dict(checkpoint["model"])
        self.opt.load_state_dict(checkpoint["optimizer"])
