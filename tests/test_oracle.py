"""Random runs of the wrapper against a loop in fp64 that is written apart from it."""

import itertools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import OPTIMIZERS, Oracle, Settings
from plain_loop import signed
from tensors import BACKENDS
from tolerance import assert_all_bit_equal, assert_close, assert_near

from stepclock_ext import ClockedOptimizer, LossScale

SHAPES = [(), (0,), (3,), (5, 4), (2, 1, 6), (2, 3, 4, 2)]
# Roundings of an update and of the sums before it; a norm adds up to 100 values.
ROUNDINGS_PER_UPDATE = 150


def transposed(t):
    axes = tuple(reversed(range(t.dim())))
    return t.permute(axes).contiguous().permute(axes)


def channels_last(t):
    return t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t


def with_gaps(t):
    return t.repeat_interleave(2, -1)[..., ::2] if t.dim() else t


def expanded(t):
    """One value for all, in one place."""
    return t.flatten()[:1].reshape([1] * t.dim()).expand(t.shape)


LAYOUTS = [torch.clone, transposed, channels_last, with_gaps]
runs = settings(max_examples=120, derandomize=True, deadline=None, database=None)
layouts = st.sampled_from(LAYOUTS)


@st.composite
def micro_steps(draw, num_params):
    """Weight, rows that take part, and perhaps where a bad value stands."""
    rows = draw(st.sets(st.sampled_from(range(num_params)), min_size=1))
    weight = draw(st.sampled_from([0.0, 0.5, 1.0, 1.0, 1.0, 2.0, 3.0]))
    poison = draw(st.sampled_from([None] * 7 + [math.inf, -math.inf, math.nan]))
    return weight, sorted(rows), poison, draw(layouts), draw(st.integers(0, 99))


@st.composite
def plans(draw, max_steps=4):
    """Settings, parameters and what happens in each epoch."""
    steps = st.integers(1, max_steps)
    shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4))
    chosen = Settings(
        optimizer=draw(st.sampled_from(list(OPTIMIZERS))),
        steps=draw(steps),
        tail=draw(st.sampled_from(["flush", "carry", "drop"])),
        reduction=draw(st.sampled_from(["mean", "sum"])),
        max_norm=draw(st.sampled_from([None, 0.5, 1e6])),
        norm_type=draw(st.sampled_from([2.0, math.inf, 1.0, 3.0])),
        scale=draw(st.sampled_from(["none", "static", "dynamic"])),
    )
    epochs = draw(st.lists(st.lists(micro_steps(len(shapes)), max_size=7), max_size=3))
    return {
        "settings": chosen,
        "dtype": draw(st.sampled_from([torch.float32, torch.float64])),
        "backend": draw(st.sampled_from(BACKENDS)),
        "shapes": [(shape, draw(layouts)) for shape in shapes],
        "epochs": epochs,
        "later_steps": draw(steps),
    }


class Run:
    """The wrapper and the oracle side by side."""

    def __init__(self, plan):
        self.plan, chosen, self.dtype = plan, plan["settings"], plan["dtype"]
        self.params = [
            torch.nn.Parameter(layout(signed(shape, self.dtype, seed=-1).clone()))
            for shape, layout in plan["shapes"]
        ]
        copies = [p.detach().double().clone().requires_grad_() for p in self.params]
        self.oracle = Oracle(copies, chosen)
        self.inner = OPTIMIZERS[chosen.optimizer](self.params)
        scheduler = torch.optim.lr_scheduler.LambdaLR(self.inner, lambda u: 1 / (1 + u))
        dynamic = LossScale(init_scale=1024.0, growth_interval=2, min_scale=256.0)
        self.opt = ClockedOptimizer(
            self.inner,
            gradient_accumulation_steps=chosen.steps,
            max_grad_norm=chosen.max_norm,
            norm_type=chosen.norm_type,
            reduction=chosen.reduction,
            loss_scale={"none": None, "static": 8.0, "dynamic": dynamic}[chosen.scale],
            schedulers=[scheduler],
            tail=chosen.tail,
            backend=plan["backend"],
        )

    def inputs(self, rows, poison, layout, seed):
        """x for each row; the first that can holds a bad value."""
        inputs = {}
        for row in rows:
            x = signed(self.params[row].shape, self.dtype, seed=seed + row).clone()
            if poison is not None and x.numel():
                x.view(-1)[seed % x.numel()] = poison
                poison = None
            inputs[row] = layout(x)
        return inputs

    def micro(self, weight, rows, poison, layout, seed):
        inputs = self.inputs(rows, poison, layout, seed)
        loss = sum((self.params[row] * x).sum() for row, x in inputs.items())
        self.opt.backward(loss, weight=weight)
        expected = self.oracle.micro({row: x.double() for row, x in inputs.items()}, weight)
        self.check(self.opt.step, expected)

    def end_epoch(self):
        self.check(self.opt.end_epoch, self.oracle.end_epoch())

    def check(self, act, expected):
        """`act` does what was expected, and without an update leaves every bit alone."""
        before = self.snapshot()
        info = act()
        assert (info.updated, info.skipped) == (expected.updated, expected.skipped)
        if not info.updated:
            assert_all_bit_equal(self.snapshot(), before)
        self.check_report(info, expected)
        self.check_params()

    def check_report(self, info, expected):
        assert info.loss_scale == expected.loss_scale
        assert_near(info.lr[0], expected.lr, num_roundings=4)
        for name in ("loss", "grad_norm", "clipped_norm"):
            got, want = getattr(info, name), getattr(expected, name)
            assert (got is None) == (want is None)
            if want is not None and expected.updated:
                largest = expected.largest if name == "loss" else 0.0
                rounded = dict(num_roundings=ROUNDINGS_PER_UPDATE, dtype=self.dtype)
                assert_near(got, want, magnitude=largest, **rounded)
        assert not expected.skipped or not math.isfinite(info.grad_norm)

    def check_params(self):
        for p, q in zip(self.params, self.oracle.params, strict=True):
            num_roundings = ROUNDINGS_PER_UPDATE * (1 + self.oracle.updates)
            largest = self.oracle.largest
            assert_close(p.detach(), q.detach(), num_roundings=num_roundings, magnitude=largest)

    def snapshot(self):
        """Copies of everything that an update may change."""
        states = [v for state in self.inner.state.values() for v in state.values()]
        tensors = [v for v in states if isinstance(v, torch.Tensor)]
        return [t.detach().clone() for t in (*self.params, *tensors)]

    def check_clock(self, num_epochs):
        clock, oracle = self.opt.clock, self.oracle
        counted = (clock.micro_step, clock.update_step, clock.skipped_updates, clock.epoch)
        assert counted == (oracle.micro_steps, oracle.updates, oracle.skips, num_epochs)
        assert clock.weight_seen == oracle.weight_seen
        assert clock.micro_step_in_epoch == 0


@runs
@given(plans())
def test_windows_weights_tails_scales_and_skips_are_the_oracles(plan):
    run = Run(plan)
    for index, epoch in enumerate(plan["epochs"]):
        if index == 1:
            run.opt.gradient_accumulation_steps = run.oracle.next_steps = plan["later_steps"]
        for micro in epoch:
            run.micro(*micro)
        run.end_epoch()
    run.check_clock(len(plan["epochs"]))


@runs
@given(plans(max_steps=1), st.lists(st.sampled_from([*LAYOUTS, expanded]), min_size=3))
def test_gradients_set_by_hand_in_any_memory_layout_are_the_oracles(plan, made):
    run = Run({**plan, "settings": Settings(**{**vars(plan["settings"]), "scale": "none"})})
    makers = itertools.cycle(made)
    for _, rows, poison, _, seed in itertools.chain.from_iterable(plan["epochs"]):
        grads = {}
        for row, x in run.inputs(rows, poison, torch.clone, seed).items():
            grads[row] = next(makers)(x) if x.numel() else x
            run.params[row].grad = grads[row]
        expected = run.oracle.micro({row: grad.double() for row, grad in grads.items()}, 1.0)
        expected.loss = None  # nobody told the wrapper
        run.check(run.opt.step, expected)
