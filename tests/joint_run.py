"""A run of several processes, reduced in any of the ways there are, that saves and loads."""

import random

import numpy as np
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from stepclock_ext import EMA, ClockedOptimizer, ReducerOptions
from stepclock_ext.checkpoint import load_checkpoint, save_checkpoint

SAMPLES = 8  # of an update: micro steps of all ranks
KINDS = ["own", "zero1", "ddp", "fsdp"]  # "alone" is one process
_SENT = {torch.int16: torch.int32}
TINY = 1e-3  # MiB: several buckets


class Net(torch.nn.Module):
    """Layers that shares cut unevenly, the last of one row, dropout and a buffer."""

    def __init__(self, dropout):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(5, 13),
            torch.nn.Dropout(dropout),
            torch.nn.Tanh(),
            torch.nn.Linear(13, 6),
            torch.nn.Tanh(),
            torch.nn.Linear(6, 1),
        )
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        return self.body(x)


def make_model(kind, dtype, dropout):
    torch.manual_seed(0)
    model = Net(dropout).to(dtype)
    if kind == "ddp":
        # Else DDP lays its buckets out anew after its first reduction, which rounds sums otherwise.
        return DistributedDataParallel(model, find_unused_parameters=True)
    if kind == "fsdp":
        for layer in model.body:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer)
        return fully_shard(model)
    return model


class JointRun:
    """One rank's part; each rank has seeds and samples of its own.

    Args:
        dropout: where it is not 0, random numbers change the run.
        dtype: bf16 parameters have masters.
    """

    def __init__(self, rank, world, kind, *, dtype=torch.float32, dropout=0.5, make=None):
        self.rank, self.world, self.dtype, self.is_random = rank, world, dtype, dropout > 0
        self.model = make_model(kind, dtype, dropout)
        self.seed()
        self.ema = EMA(0.9)
        own = ReducerOptions(bucket_cap_mb=TINY, shard_states=kind == "zero1")
        self.opt = ClockedOptimizer(
            (make or torch.optim.AdamW)(self.model.parameters(), lr=0.05),
            gradient_accumulation_steps=SAMPLES // world,
            max_grad_norm=1.0,
            ema=self.ema,
            master_weights=dtype == torch.bfloat16,
            model=self.model if kind in ("ddp", "fsdp") else None,
            process_group=own if kind in ("own", "zero1") else None,
        )

    def seed(self):
        """Every generator begins, on each rank somewhere else."""
        for number, seed_it in enumerate((random.seed, np.random.seed, torch.manual_seed)):
            seed_it(1000 * number + self.rank)

    def micro_step(self):
        clock = self.opt.clock
        sample = SAMPLES * clock.update_step + self.world * clock.micro_step_in_window + self.rank
        generator = torch.Generator().manual_seed(sample)
        x = torch.randn(3, 5, generator=generator).to(self.dtype)
        noise = random.random() + np.random.standard_normal() if self.is_random else 0.0
        loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean() * (1 + 0.01 * noise)
        self.opt.backward(loss, weight=1 + sample % 2)
        return self.opt.step()

    def train(self, updates):
        """Up to that many updates in all."""
        while self.opt.clock.update_step < updates:
            self.micro_step()
        return self

    def save(self, folder, **options):
        return save_checkpoint(folder, model=self.model, optimizer=self.opt, **options)

    def load(self, path, **options):
        return load_checkpoint(path, model=self.model, optimizer=self.opt, **options)

    def values(self, *, draws=True):
        """All there is, in whole tensors and by bare names; and what the generators give next."""
        bare = getattr(self.model, "module", self.model)
        state = self.opt.state_dict()
        own = state["stepclock"]
        found = {
            "model": bare.state_dict(),
            "state": state["state"],
            "masters": own["masters"],
            "ema": own["ema"],
            "clock": own["clock"],
        }
        drawn = (random.random(), np.random.random(), torch.rand(()).item()) if draws else None
        return whole({**found, "draws": drawn})


def whole(value):
    """`value` with whole tensors, copied."""
    if isinstance(value, torch.Tensor):
        if hasattr(value, "full_tensor"):  # gloo sends no int16, the remainders of bf16
            value = value.to(_SENT.get(value.dtype, value.dtype)).full_tensor().to(value.dtype)
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return value


def assert_same(actual, expected, compare):
    """Trees of the same keys, tensors by `compare`, all else equal."""
    if isinstance(expected, torch.Tensor):
        compare(actual, expected)
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key, item in expected.items():
            assert_same(actual[key], item, compare)
    else:
        assert actual == expected
