"""Case 21 in every direction, and 22 and 32 with what is kept beside 16-bit parameters."""

import copy

import pytest
import torch
from helpers import each_backend, snapshot
from sixteen_bit import MAKERS, each_half, given, micro_step, start_params, through_a_file
from tensors import HALVES
from tolerance import assert_all_bit_equal, assert_close, assert_same_state

from stepclock_ext import EMA, ClockedOptimizer

FINE = 1.000244140625  # 1 + 2**-12: bf16 holds 1.0, fp16 1.0


def adam_state(dtype, *, amsgrad=False, step=1001.0):
    keys = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * amsgrad
    return {
        "step": torch.tensor(step),
        **{key: torch.full((3,), FINE, dtype=dtype) for key in keys},
    }


def loaded(make, state, *, dtype, backend="auto", **options):
    """A parameter of ones whose optimizer has loaded `state` through a file."""
    p = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    opt = ClockedOptimizer(make([p]), backend=backend, **options)
    saved = opt.state_dict()
    saved["state"] = {0: state}
    opt.load_state_dict(through_a_file(saved))
    return p, opt


def plain_adam(params):
    return torch.optim.AdamW(params, lr=0.1, weight_decay=0.0)


def expected_adam(value):
    """Update 1002 of a parameter of 1 from moments of `value`, with gradient 2."""
    m, v = value + 0.1 * (2 - value), value * 0.999 + 0.001 * 4
    step = 0.1 / (1 - 0.9**1002) * m / ((v / (1 - 0.999**1002)) ** 0.5 + 1e-8)
    return torch.full((3,), 1 - step, dtype=torch.float64)


def dtypes_of(state):
    return {key: value.dtype for key, value in state.items() if key != "step"}


@each_backend
@each_half
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("options", [{}, {"master_weights": True}, {"rounding": "stochastic"}])
def test_fp32_moments_of_16_bit_parameters_survive_and_run(options, amsgrad, dtype, backend):
    state = adam_state(torch.float32, amsgrad=amsgrad)
    p, opt = loaded(
        lambda ps: torch.optim.AdamW(ps, lr=0.1, amsgrad=amsgrad),
        state,
        dtype=dtype,
        backend=backend,
        **options,
    )
    assert_same_state(dict(opt.state[p]), state)
    opt.backward(given((p, torch.full_like(p, 2.0))))
    assert opt.step().updated
    now = opt.state[p]
    assert now["step"].item() == 1002.0
    assert dtypes_of(now) == dtypes_of(state)
    m, v = FINE + 0.1 * (2 - FINE), FINE * 0.999 + 0.001 * 4
    assert_close(now["exp_avg"], torch.full((3,), m), num_roundings=4)
    assert_close(now["exp_avg_sq"], torch.full((3,), v), num_roundings=4)
    if amsgrad:
        assert_close(now["max_exp_avg_sq"], torch.full((3,), v), num_roundings=4)


@each_backend
@pytest.mark.parametrize("kept", HALVES)
def test_16_bit_moments_of_fp32_parameters_survive_and_run(kept, backend):
    state = adam_state(kept)
    p, opt = loaded(plain_adam, state, dtype=torch.float32, backend=backend)
    assert_same_state(dict(opt.state[p]), state)
    opt.backward(2 * p.sum())
    assert opt.step().updated
    assert dtypes_of(opt.state[p]) == dtypes_of(state)
    assert_close(p.detach(), expected_adam(1.0), num_roundings=8)
    assert_close(opt.state[p]["exp_avg"], torch.full((3,), 1.1), num_roundings=1)


@each_backend
@pytest.mark.parametrize("kept", [*HALVES, torch.float32])
def test_narrower_moments_of_fp64_parameters_run(kept, backend):
    """In plain torch they do: loading makes them fp64."""
    state = adam_state(kept)
    value = state["exp_avg"][0].item()
    p, opt = loaded(plain_adam, state, dtype=torch.float64, backend=backend)
    opt.backward(2 * p.sum())
    assert opt.step().updated
    assert_close(p.detach(), expected_adam(value), num_roundings=8)


@each_backend
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_fp64_moments_of_narrower_parameters_run(dtype, backend):
    """In plain torch they do: loading rounds them."""
    p, opt = loaded(plain_adam, adam_state(torch.float64), dtype=dtype, backend=backend)
    opt.backward(given((p, torch.full_like(p, 2.0))))
    assert opt.step().updated
    assert_close(p.detach(), expected_adam(FINE), num_roundings=8)


@each_backend
@pytest.mark.parametrize("kept", HALVES)
def test_a_16_bit_momentum_buffer_of_an_fp32_parameter_survives_and_runs(kept, backend):
    state = {"momentum_buffer": torch.full((3,), 2.0, dtype=kept)}
    p, opt = loaded(
        lambda ps: torch.optim.SGD(ps, lr=0.25, momentum=0.5),
        state,
        dtype=torch.float32,
        backend=backend,
    )
    assert_same_state(dict(opt.state[p]), state)
    opt.backward(2 * p.sum())
    assert opt.step().updated
    assert opt.state[p]["momentum_buffer"].dtype == kept
    assert opt.state[p]["momentum_buffer"].tolist() == [3.0] * 3
    assert p.tolist() == [0.25] * 3


@each_half
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_a_step_counter_of_any_dtype_reads_1001(kept, dtype):
    """A bf16 counter would read 1000: torch makes it fp32, and so it stays."""
    state = {**adam_state(kept), "step": torch.tensor(1001.0)}
    p, opt = loaded(MAKERS["AdamW"], state, dtype=dtype)
    opt.load_state_dict(opt.state_dict())
    assert opt.state[p]["step"].dtype == torch.float32
    assert opt.state[p]["step"].item() == 1001.0


class Slow(torch.optim.Optimizer):
    """An optimizer of a user: it keeps an fp32 mean, and a 16-bit one."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["mean"] = torch.zeros_like(p, dtype=torch.float32)
                state["coarse"] = torch.zeros_like(p, dtype=torch.bfloat16)
                state["count"] = 0
            state["mean"] += FINE - 1
            state["coarse"] += 1
            state["count"] += 1
            p -= state["mean"].to(p.dtype)


class OwnAdam(torch.optim.AdamW):
    """A subclass may do anything: it has no fused rule."""


@each_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_state_of_a_custom_optimizer_keeps_its_dtypes(dtype, backend):
    p = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    opt = ClockedOptimizer(Slow([p]), backend=backend)
    for _ in range(3):
        opt.backward(p.sum())
        opt.step()
        before = copy.deepcopy(dict(opt.state[p]))
        opt.load_state_dict(through_a_file(opt.state_dict()))
        assert_same_state(dict(opt.state[p]), before)
    assert opt.state[p]["mean"].tolist() == [3 * (FINE - 1)] * 3


@each_half
def test_a_subclass_of_a_stock_optimizer_keeps_its_dtypes(dtype):
    state = adam_state(torch.float32)
    p, opt = loaded(OwnAdam, state, dtype=dtype)
    assert_same_state(dict(opt.state[p]), state)


STOCK = {
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": torch.optim.RMSprop,
    "NAdam": torch.optim.NAdam,
}


@each_half
@pytest.mark.parametrize("make", STOCK.values(), ids=STOCK)
def test_a_stock_optimizer_without_a_rule_gets_what_torch_makes_of_it(make, dtype):
    """Its own step cannot run on mixed dtypes."""
    wide = torch.nn.Parameter(torch.ones(3))
    other = ClockedOptimizer(make([wide], lr=0.1))
    other.backward(wide.sum())
    other.step()
    p, q = (torch.nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2))
    opt, bare = ClockedOptimizer(make([p], lr=0.1)), make([q], lr=0.1)
    opt.load_state_dict(through_a_file(other.state_dict()))
    bare.load_state_dict(through_a_file(other.state_dict()))
    assert_same_state(dict(opt.state[p]), dict(bare.state[q]))
    opt.backward(p.sum())
    assert opt.step().updated
    q.sum().backward()
    bare.step()
    assert_all_bit_equal([p.detach()], [q.detach()])


@each_backend
@each_half
def test_two_optimizers_keep_the_dtypes_of_each(dtype, backend):
    p, q, r = start_params(dtype, shapes=[(3,), (5,), (7,)])
    inners = [Slow([p]), MAKERS["AdamW"]([q, r])]
    opt = ClockedOptimizer(inners, gradient_accumulation_steps=3, backend=backend)
    for number in (1, 2, 3):
        micro_step(opt, [p, q, r], number, dtype=dtype)
    saved = through_a_file(opt.state_dict())
    before = [copy.deepcopy(dict(opt.state[x])) for x in (p, q, r)]
    opt.load_state_dict(saved)
    assert_same_state([dict(opt.state[x]) for x in (p, q, r)], before)
    assert before[1]["exp_avg"].dtype == torch.float32


@each_backend
@each_half
def test_fp32_sums_in_the_middle_of_a_window_stay_fp32(dtype, backend):
    """Case 22: K=4, saved after micro 6; the first update after the load has all its gradients."""
    ends = []
    for stops in (False, True):
        params = start_params(dtype, shapes=[(3,), (257,)])
        opt = ClockedOptimizer(
            MAKERS["AdamW"](params), gradient_accumulation_steps=4, backend=backend
        )
        for number in range(1, 9):
            micro_step(opt, params, number, dtype=dtype)
            if stops and number == 6:
                saved = through_a_file([opt.state_dict(), [p.detach() for p in params]])
                sums = saved[0]["stepclock"]["accumulators"]
                assert {total.dtype for total in sums.values()} == {torch.float32}
                params = [torch.nn.Parameter(value.clone()) for value in saved[1]]
                opt = ClockedOptimizer(
                    MAKERS["AdamW"](params), gradient_accumulation_steps=4, backend=backend
                )
                opt.load_state_dict(saved[0])
                held = [opt.accumulated(p) for p in params]
                assert_all_bit_equal(held, sums.values())
        ends.append(snapshot(opt))
    assert_all_bit_equal(*ends)


@each_backend
@each_half
@pytest.mark.parametrize("options", [{"master_weights": True}, {"rounding": "stochastic"}])
def test_a_skip_is_atomic(options, dtype, backend):
    """Case 32: AdamW with weight decay, after one good update; all that is kept stays."""
    p = torch.nn.Parameter(torch.ones(2, dtype=dtype))
    ema = EMA(decay=0.5, warmup=True)
    inner = torch.optim.AdamW([p], lr=0.1, weight_decay=0.1)
    opt = ClockedOptimizer(inner, max_grad_norm=1.0, ema=ema, backend=backend, **options)
    opt.backward(given((p, torch.ones_like(p))))
    assert opt.step().updated
    before = copy.deepcopy(opt.state_dict())
    values = [p.detach().clone(), opt.master_weight(p)]
    opt.backward(given((p, torch.tensor([torch.inf, 1.0], dtype=dtype))))
    assert opt.step().skipped
    assert_all_bit_equal([p.detach(), opt.master_weight(p)], values)
    now = opt.state_dict()
    assert_same_state(now["state"], before["state"])
    for key in ("masters", "ema", "rounding_seed"):
        assert_same_state(now["stepclock"][key], before["stepclock"][key])
