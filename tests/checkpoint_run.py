"""A run of thirty micro steps in which everything that a checkpoint must hold plays a part."""

import random

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from stepclock_ext import ClockedOptimizer, LossScale
from stepclock_ext.checkpoint import load_checkpoint, save_checkpoint
from stepclock_ext.plan import TrainPlan

NUM_EPOCHS = 3
MICRO_STEPS_PER_EPOCH = 10
NUM_MICRO = NUM_EPOCHS * MICRO_STEPS_PER_EPOCH
BAD_MICRO = 6  # its window is skipped
PLAN = TrainPlan(
    dataset_size=20,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=4,
    num_train_epochs=NUM_EPOCHS,
    learning_rate=0.05,
    warmup_steps=2,
)


class Stopped(Exception):
    """The run was stopped where the test wanted it."""


class Run:
    """Dropout, batch norm, tied weights, a dynamic scale, a schedule, a loader that shuffles."""

    def __init__(self, *, seed=0, make=torch.optim.AdamW):
        for seed_it in (random.seed, np.random.seed, torch.manual_seed):
            seed_it(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Dropout(0.5),
            torch.nn.Linear(8, 4),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(4, 8),
        )
        self.model[5].weight = self.model[0].weight
        inner = make(self.model.parameters(), lr=PLAN.learning_rate)
        self.opt = ClockedOptimizer(
            inner,
            gradient_accumulation_steps=PLAN.gradient_accumulation_steps,
            max_grad_norm=1.0,
            loss_scale=LossScale(init_scale=1024.0, growth_interval=2),
            schedulers=[PLAN.make_scheduler(inner)],
        )
        generator = torch.Generator().manual_seed(1)
        self.data = TensorDataset(torch.randn(20, 4, generator=generator))
        self.reports = []

    def loader(self, epoch):
        """Shuffled for each epoch anew; it also draws from torch's global generator."""
        order = torch.Generator().manual_seed(100 + epoch)
        sampler = torch.utils.data.RandomSampler(self.data, generator=order)
        return DataLoader(self.data, batch_size=2, sampler=sampler)

    def train(self, *, resume=None, stop_after=None):
        """Trains to the end, or raises `Stopped` after `stop_after` micro steps in all."""
        for epoch in range(resume.epoch if resume else 0, NUM_EPOCHS):
            loader = self.loader(epoch)
            for (x,) in resume.remaining(loader, epoch=epoch) if resume else loader:
                self.micro_step(x)
                if self.opt.clock.micro_step == stop_after:
                    raise Stopped
            self.report(self.opt.end_epoch())
        return self

    def micro_step(self, x):
        noise = random.random() + float(np.random.standard_normal())
        loss = self.model(x + noise).square().mean()
        if self.opt.clock.micro_step + 1 == BAD_MICRO:
            loss = loss * torch.inf
        self.opt.backward(loss, weight=1 + random.randrange(3))
        self.report(self.opt.step())

    def report(self, info):
        due = self.opt.clock.due("eval", every=2)
        self.reports.append(f"{info} {due=}")  # a text: NaN is not NaN

    def stopped_after(self, micro_steps):
        try:
            self.train(stop_after=micro_steps)
        except Stopped:
            return self
        raise AssertionError(f"the run has no micro step {micro_steps}")

    def save(self, folder, **options):
        return save_checkpoint(folder, model=self.model, optimizer=self.opt, **options)

    def load(self, path, **options):
        return load_checkpoint(path, model=self.model, optimizer=self.opt, **options)

    def values(self):
        """Copies of weights, buffers, gradients and moments."""
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        moments = [
            value
            for p in self.model.parameters()
            for value in self.opt.state.get(p, {}).values()
            if isinstance(value, torch.Tensor)
        ]
        tensors = (*self.model.state_dict().values(), *grads, *moments)
        return [tensor.detach().clone() for tensor in tensors]

    def draws(self):
        """What each generator gives next."""
        return random.random(), np.random.random(), torch.rand(()).item()
