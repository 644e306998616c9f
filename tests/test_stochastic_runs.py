"""Runs with stochastic rounding: the same bits by seed, and the fp32 run in the mean."""

import math
from functools import partial

import pytest
import torch
from half_training import HalfTraining
from helpers import each_backend
from sixteen_bit import MAKERS, each_half, each_maker, given, micro_step, start_params
from tolerance import assert_all_bit_equal

from stepclock_ext import EMA, ClockedOptimizer

SHAPES = [(), (5, 7), (40_001,)]
SIGMAS = 5  # beyond chance: one in three million
NUM_ELEMENTS = 8192
NUM_UPDATES = 64


def run(make, dtype, backend, *, seed=1, threads=1, **options):
    """Parameters after four updates of two micro steps."""
    params = start_params(dtype, shapes=SHAPES)
    torch.manual_seed(seed)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        opt = ClockedOptimizer(
            make(params),
            gradient_accumulation_steps=2,
            max_grad_norm=1.0,
            backend=backend,
            **{"rounding": "stochastic", **options},
        )
        for number in range(1, 9):
            torch.rand(number)  # the global generator has no part in it
            micro_step(opt, params, number, dtype=dtype)
    finally:
        torch.set_num_threads(before)
    assert opt.clock.update_step == 4
    return [p.detach() for p in params]


@each_backend
@each_half
@each_maker
def test_one_seed_gives_one_run_and_another_seed_another(make, dtype, backend):
    first = run(make, dtype, backend)
    assert_all_bit_equal(run(make, dtype, backend), first)
    other = run(make, dtype, backend, seed=2)
    assert not torch.equal(other[2], first[2])
    assert not torch.equal(run(make, dtype, backend, rounding="nearest")[2], first[2])


@each_half
@each_maker
def test_one_thread_and_two_give_the_same_bits(make, dtype):
    assert_all_bit_equal(*(run(make, dtype, "auto", threads=n) for n in (1, 2)))


@each_backend
@each_half
def test_the_window_that_a_run_was_saved_in_changes_no_bit(dtype, backend):
    options = {"dtype": dtype, "backend": backend, "rounding": "stochastic"}
    whole = HalfTraining(**options).run()
    for number in (2, 3, 8):
        stopped = HalfTraining(**options).run(last=number)
        resumed = HalfTraining(seed=9, **options)
        resumed.resume(stopped.checkpoint())
        assert_all_bit_equal(resumed.run(number + 1).values(), whole.values())


@each_backend
@each_half
def test_a_skipped_window_draws_no_other_numbers(dtype, backend):
    ends = []
    for skips in (0, 3):
        params = start_params(dtype, shapes=SHAPES)
        torch.manual_seed(3)
        inner = MAKERS["AdamW"](params)
        opt = ClockedOptimizer(inner, rounding="stochastic", backend=backend)
        for number in (1, 2, 3):
            for _ in range(skips):
                assert micro_step(opt, params, number, dtype=dtype, bad=True).skipped
            micro_step(opt, params, number, dtype=dtype)
        ends.append([p.detach() for p in params])
    assert_all_bit_equal(*ends)


@each_backend
@each_half
def test_a_parameter_without_a_gradient_takes_no_part(dtype, backend):
    p, q = start_params(dtype, shapes=[(7,), (300,)])
    inner = torch.optim.AdamW([p, q], lr=0.01, weight_decay=0.1)
    opt = ClockedOptimizer(inner, rounding="stochastic", ema=EMA(0.5), backend=backend)
    before = q.detach().clone()
    for _ in range(3):
        opt.backward(given((p, torch.ones_like(p))))
        opt.step()
    assert_all_bit_equal([q.detach()], [before])


@each_backend
@each_maker
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_parameters_are_not_rounded(dtype, make, backend):
    ends = []
    for rounding in ("stochastic", "nearest"):
        params = start_params(torch.bfloat16, as_dtype=dtype, shapes=SHAPES)
        opt = ClockedOptimizer(make(params), rounding=rounding, backend=backend)
        for number in (1, 2, 3):
            micro_step(opt, params, number, dtype=torch.bfloat16)
        ends.append([p.detach() for p in params])
    assert_all_bit_equal(*ends)


TINY = {
    "SGD": torch.optim.SGD,
    "AdamW": partial(torch.optim.AdamW, weight_decay=0.0),
    "two micro steps": torch.optim.SGD,
}


def tiny_updates(make, dtype, backend, step, *, as_dtype=None, steps=1, **options):
    """Parameters of 1 after `NUM_UPDATES` updates by about `step`."""
    p = torch.nn.Parameter(torch.ones(NUM_ELEMENTS, dtype=as_dtype or dtype))
    torch.manual_seed(4)
    opt = ClockedOptimizer(
        make([p], lr=step), gradient_accumulation_steps=steps, backend=backend, **options
    )
    for _ in range(NUM_UPDATES * steps):
        opt.backward(given((p, torch.ones_like(p, dtype=dtype))))
        opt.step()
    return p.detach().double()


@each_backend
@each_half
@pytest.mark.parametrize("name", TINY)
def test_many_tiny_updates_follow_the_fp32_run_in_mean_and_spread(name, dtype, backend):
    """Below 1 the unit is eps / 2. An update of a share f of it takes one with probability f, so
    that after n updates the number of units taken is binomial: mean n f, variance n f (1 - f).
    """
    unit = torch.finfo(dtype).eps / 2
    share = 1 / 32
    options = {"steps": 2 if name == "two micro steps" else 1}
    make = TINY[name]
    nearest = tiny_updates(make, dtype, backend, share * unit, **options)
    assert (nearest == 1).all()  # stands still
    wide = tiny_updates(make, dtype, backend, share * unit, as_dtype=torch.float32, **options)
    expected = (1 - wide[0].item()) / unit
    assert math.isclose(expected, NUM_UPDATES * share, rel_tol=1e-2)
    rounded = tiny_updates(make, dtype, backend, share * unit, rounding="stochastic", **options)
    taken = (1 - rounded) / unit
    assert torch.equal(taken, taken.round())
    f = expected / NUM_UPDATES
    variance = NUM_UPDATES * f * (1 - f)
    error = math.sqrt(variance / NUM_ELEMENTS)
    assert abs(taken.mean().item() - expected) <= SIGMAS * error
    # The fourth central moment of a binomial gives the standard error of its variance.
    fourth = variance * (1 + 3 * (NUM_UPDATES - 2) * f * (1 - f))
    error = math.sqrt((fourth - variance**2) / NUM_ELEMENTS)
    assert abs(taken.var().item() - variance) <= SIGMAS * error
