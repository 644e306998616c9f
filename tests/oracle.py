"""The wrapper's promises once more, in fp64 and as plainly as they can be written.

A loop that keeps each window's gradients in a dict, and steps a ``torch.optim`` optimizer on fp64
copies of the parameters. It shares no code with the wrapper.
"""

import math
from dataclasses import dataclass, field

import torch

BASE_LR = 0.05
OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=BASE_LR, weight_decay=0.1),
    "SGD": lambda params: torch.optim.SGD(params, lr=BASE_LR, momentum=0.9, weight_decay=0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=BASE_LR, alpha=0.9, momentum=0.5),
}


@dataclass(frozen=True)
class Settings:
    """How a run is configured; the names are those of the wrapper's arguments."""

    optimizer: str
    steps: int
    tail: str
    reduction: str
    max_norm: float | None
    norm_type: float
    scale: str  # "none", "static", "dynamic"


@dataclass
class Outcome:
    """What the wrapper must report."""

    updated: bool = False
    skipped: bool = False
    loss: float | None = None
    grad_norm: float | None = None
    clipped_norm: float | None = None
    lr: float = BASE_LR
    loss_scale: float | None = None
    largest: float = 0.0  # the largest value that went into the loss


@dataclass
class Oracle:
    """A training run.

    Attributes:
        params: fp64 copies.
        settings: of the run.
        micro_steps, updates, skips, weight_seen: what the clock must say.
        largest: the largest parameter there has been.
    """

    params: list
    settings: Settings
    micro_steps: int = 0
    updates: int = 0
    skips: int = 0
    weight_seen: float = 0.0
    largest: float = 0.0
    sums: dict = field(default_factory=dict)
    weights: list = field(default_factory=list)
    losses: list = field(default_factory=list)
    sizes: list = field(default_factory=list)

    def __post_init__(self):
        self.inner = OPTIMIZERS[self.settings.optimizer](self.params)
        self.scale = {"none": None, "static": 8.0, "dynamic": 1024.0}[self.settings.scale]
        self.good = 0
        self.steps = self.settings.steps
        self.next_steps = self.steps
        self._remember_largest()

    def micro(self, inputs, weight):
        """One micro step of loss ``sum(p * x)``; `inputs` maps rows to x."""
        if not self.weights:
            self.steps = self.next_steps
        self.micro_steps += 1
        self.weight_seen += weight
        self.weights.append(weight)
        if weight > 0:
            for row, x in inputs.items():
                self.sums[row] = self.sums.get(row, 0) + weight * x
            terms = [self.params[row].detach() * x for row, x in inputs.items()]
            self.losses.append(weight * sum(term.sum().item() for term in terms))
            self.sizes.append(weight * sum(term.abs().sum().item() for term in terms))
        if len(self.weights) < self.steps:
            return self._report()
        return self._close()

    def end_epoch(self):
        """The tail."""
        if self.settings.tail == "flush" and self.weights:
            return self._close()
        if self.settings.tail == "drop":
            self.weight_seen -= sum(self.weights)
            self._open()
        return self._report()

    def _close(self):
        total = sum(self.weights)
        if total == 0:
            self._open()
            return self._report()
        divisor = total if self.settings.reduction == "mean" else 1.0
        grads = {row: value / divisor for row, value in self.sums.items()}
        norm = self._norm(grads.values())
        clip = 1.0
        if self.settings.max_norm is not None:
            clip = min(1.0, self.settings.max_norm / (norm + 1e-6))
        outcome = self._report()
        outcome.loss = sum(self.losses) / divisor
        outcome.largest = sum(self.sizes) / divisor
        outcome.grad_norm, outcome.clipped_norm = norm, norm * clip
        outcome.updated = math.isfinite(norm)
        outcome.skipped = not outcome.updated
        if outcome.updated:
            self._update({row: grad * clip for row, grad in grads.items()})
        else:
            self.skips += 1
        self._move_scale(outcome.updated)
        self._open()
        return outcome

    def _update(self, grads):
        for row, p in enumerate(self.params):
            p.grad = grads.get(row)
        (group,) = self.inner.param_groups
        group["lr"] = self._lr()
        self.inner.step()
        self.updates += 1
        self._remember_largest()

    def _remember_largest(self):
        for p in self.params:
            if p.numel():
                self.largest = max(self.largest, p.abs().max().item())

    def _lr(self):
        return BASE_LR / (1 + self.updates)

    def _norm(self, grads):
        values = [abs(value) for grad in grads for value in grad.flatten().tolist()]
        if not all(map(math.isfinite, values)):
            return math.nan
        p = self.settings.norm_type
        if math.isinf(p):
            return max(values, default=0.0)
        return math.fsum(value**p for value in values) ** (1 / p)

    def _move_scale(self, finite):
        """Growth by 2 after two good updates in a row, back-off by half, a floor of 256."""
        if self.settings.scale != "dynamic":
            return
        if not finite:
            self.scale, self.good = max(256.0, self.scale / 2), 0
        else:
            self.good += 1
            if self.good == 2:
                self.scale, self.good = self.scale * 2, 0

    def _open(self):
        self.sums, self.weights, self.losses, self.sizes = {}, [], [], []
        self.steps = self.next_steps

    def _report(self):
        return Outcome(lr=self._lr(), loss_scale=self.scale)
