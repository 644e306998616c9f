"""Averages of the weights: the recurrence by hand, one move an update, under any optimizer."""

from functools import partial

import pytest
import torch
from helpers import each_backend
from sixteen_bit import MAKERS, given, micro_step, start_params
from tensors import dtype_name
from tolerance import assert_all_bit_equal, assert_bit_equal, assert_close

from stepclock_ext import EMA, ClockedOptimizer

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
SHAPES = [(), (5, 7), (17_001,)]
NUM_UPDATES = 10


class Average:
    """The recurrence in fp64, started from a copy."""

    def __init__(self, start, decay, warmup):
        self.value = start.detach().to(torch.float64, copy=True)
        self.decay, self.warmup, self.update = decay, warmup, 0

    def move(self, p):
        self.update += 1
        d = self.decay
        if self.warmup:
            d = min(d, (1 + self.update) / (10 + self.update))
        self.value = d * self.value + (1 - d) * p.detach().double()

    def check(self, actual):
        assert_close(actual, self.value, num_roundings=4 * self.update)


def read(ema, params):
    return [ema.average(p).clone() for p in params]


@each_backend
@each_dtype
@pytest.mark.parametrize("warmup", [False, True])
def test_ten_updates_give_the_recurrence_worked_out_by_hand(warmup, dtype, backend):
    params = start_params(torch.float16, as_dtype=dtype, shapes=SHAPES)
    ema = EMA(0.5, warmup)
    expected = [Average(p, 0.5, warmup) for p in params]
    opt = ClockedOptimizer(
        MAKERS["AdamW"](params, lr=0.05),
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        ema=ema,
        backend=backend,
    )
    for number in range(1, 2 * NUM_UPDATES + 1):
        before = read(ema, params)
        info = micro_step(opt, params, number, dtype=torch.float16)
        if not info.updated:
            assert_all_bit_equal(read(ema, params), before)
            continue
        for p, average in zip(params, expected, strict=True):
            average.move(p)
            average.check(ema.average(p))
    assert ema.updates == opt.clock.update_step == NUM_UPDATES
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert {ema.average(p).dtype for p in params} == {wide}


@each_backend
def test_the_warm_up_is_counted_in_updates_from_one(backend):
    """w falls by 1 an update from 1: d is 2/11, 3/12, 4/13, and then the decay, 0.3."""
    w = torch.nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    ema = EMA(decay=0.3, warmup=True)
    inner = torch.optim.SGD([w], lr=1.0)
    opt = ClockedOptimizer(inner, gradient_accumulation_steps=3, ema=ema, backend=backend)
    average = 1.0
    for update, d in enumerate([2 / 11, 3 / 12, 0.3, 0.3], start=1):
        for _ in range(3):
            opt.backward(w * 1.0)
            opt.step()
        average = d * average + (1 - d) * (1.0 - update)
        assert_close(ema.average(w), torch.tensor(average, dtype=torch.float64), num_roundings=12)


@each_backend
@each_dtype
def test_a_skipped_window_moves_no_average_and_no_warm_up(dtype, backend):
    params = start_params(torch.float16, as_dtype=dtype, shapes=SHAPES)
    ema = EMA(decay=0.9, warmup=True)
    inner = MAKERS["AdamW"](params, lr=0.05)
    opt = ClockedOptimizer(inner, gradient_accumulation_steps=3, ema=ema, backend=backend)
    for number in (1, 2, 3):
        micro_step(opt, params, number, dtype=torch.float16)
    before, weight = read(ema, params), ema.next_weight
    for number in (4, 5, 6):
        info = micro_step(opt, params, number, dtype=torch.float16, bad=number == 5)
    assert info.skipped
    assert_all_bit_equal(read(ema, params), before)
    assert (ema.updates, ema.next_weight) == (1, weight)


@each_backend
@pytest.mark.parametrize("skip_first", [False, True])
def test_nothing_starts_before_the_first_update(skip_first, backend):
    """So weights that are loaded after construction, or after a skip, are what it starts from."""
    w = torch.nn.Parameter(torch.ones(3))
    ema = EMA(decay=0.5)
    opt = ClockedOptimizer(torch.optim.SGD([w], lr=1.0), ema=ema, backend=backend)
    if skip_first:
        opt.backward(w.sum() * torch.inf)
        assert opt.step().skipped
    torch.nn.ParameterList([w]).load_state_dict({"0": torch.full((3,), 5.0)})
    assert ema.average(w).tolist() == [5.0] * 3
    opt.backward(w.sum())
    opt.step()
    assert ema.average(w).tolist() == [4.5] * 3


@each_backend
@pytest.mark.parametrize("tail", ["flush", "carry", "drop"])
def test_a_tail_moves_averages_where_it_updates(tail, backend):
    w = torch.nn.Parameter(torch.tensor(0.0, dtype=torch.float64))
    ema, expected = EMA(decay=0.75), Average(w, 0.75, False)
    opt = ClockedOptimizer(
        torch.optim.SGD([w], lr=1.0),
        gradient_accumulation_steps=3,
        tail=tail,
        ema=ema,
        backend=backend,
    )
    num_updates = 0
    for epoch in range(3):
        infos = []
        for _ in range(5):
            opt.backward((epoch + 1) * w)
            infos.append(opt.step())
            if infos[-1].updated:
                expected.move(w)
        if opt.end_epoch().updated:
            expected.move(w)
            num_updates += 1
        num_updates += sum(info.updated for info in infos)
        expected.check(ema.average(w))
    assert ema.updates == num_updates == {"flush": 6, "carry": 5, "drop": 3}[tail]


OPTIMIZERS = {
    **MAKERS,
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.1),
    "Muon": partial(torch.optim.Muon, lr=0.1),
    "AdamW fused": partial(torch.optim.AdamW, lr=0.1, fused=True),
    "AdamW and Muon": lambda ps: [
        torch.optim.AdamW(ps[:1], lr=0.1),
        torch.optim.Muon(ps[1:], lr=0.1),
    ],
    "Adagrad and SGD": lambda ps: [
        torch.optim.Adagrad(ps[:1], lr=0.1),
        torch.optim.SGD(ps[1:], lr=0.1),
    ],
}


@each_backend
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_any_optimizer_moves_every_average_with_gradients_or_without(make, backend):
    """One parameter has a gradient in the first two updates alone, and its average goes on."""
    params = start_params(torch.float16, as_dtype=torch.float32, shapes=[(6, 5), (4, 5), (3, 3)])
    ema = EMA(decay=0.6, warmup=True)
    expected = [Average(p, 0.6, True) for p in params]
    opt = ClockedOptimizer(make(params), max_grad_norm=0.5, ema=ema, backend=backend)
    for update in range(6):
        used = params if update < 2 else params[:2]
        opt.backward(sum((p * p).sum() for p in used))
        assert opt.step().updated
        for p, average in zip(params, expected, strict=True):
            average.move(p)
            average.check(ema.average(p))
        if update == 2:
            resting = params[2].detach().clone(), ema.average(params[2]).clone()
    assert_bit_equal(params[2].detach(), resting[0])
    assert not torch.equal(ema.average(params[2]), resting[1])


@each_backend
def test_a_frozen_parameter_and_one_that_gets_no_gradient_ever_are_averaged_too(backend):
    w, still, frozen = (torch.nn.Parameter(torch.full((3,), x)) for x in (1.0, 2.0, 3.0))
    frozen.requires_grad_(False)
    ema = EMA(decay=0.5)
    inner = torch.optim.AdamW([w, still, frozen], lr=0.1)
    opt = ClockedOptimizer(inner, ema=ema, backend=backend)
    for _ in range(2):
        opt.backward(w.sum())
        opt.step()
    with torch.no_grad():
        still.fill_(6.0)  # it moves by another hand, and its average follows
    opt.backward(w.sum())
    opt.step()
    assert ema.average(still).tolist() == [4.0] * 3
    assert ema.average(frozen).tolist() == [3.0] * 3
    assert not ema.average(w).requires_grad


@each_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_name)
def test_averages_are_of_the_masters_where_they_are_kept(dtype, backend):
    eps = torch.finfo(dtype).eps
    p, resting = (torch.nn.Parameter(torch.ones(5, dtype=dtype)) for _ in range(2))
    ema = EMA(decay=0.5)
    expected = [Average(x, 0.5, False) for x in (p, resting)]
    inner = torch.optim.SGD([p, resting], lr=eps / 64)
    opt = ClockedOptimizer(inner, master_weights=True, ema=ema, backend=backend)
    for update in range(6):
        used = [p] if update % 2 else [p, resting]
        opt.backward(given(*((x, torch.ones_like(x)) for x in used)))
        opt.step()
        for x, average in zip((p, resting), expected, strict=True):
            average.move(opt.master_weight(x))
            assert_bit_equal(ema.average(x), average.value.float())  # few bits: all exact
    assert p.tolist() == [1.0] * 5
    assert (ema.average(p) < 1).all()


@each_backend
def test_lbfgs_moves_averages_once_an_update(backend):
    w = torch.nn.Parameter(torch.tensor([3.0, -2.0], dtype=torch.float64))
    ema, expected = EMA(decay=0.5), Average(w, 0.5, False)
    inner = torch.optim.LBFGS([w], lr=0.1, max_iter=4)
    opt = ClockedOptimizer(inner, ema=ema, backend=backend)

    def closure():
        loss = (w * w).sum()
        opt.backward(loss)
        return loss

    for _ in range(2):
        assert opt.step(closure).updated
        expected.move(w)
    expected.check(ema.average(w))
