"""Arguments of the precision: what does not go together is refused at construction, by name."""

import math
import re
from functools import partial

import pytest
import torch
from helpers import clocked_sgd, run_micro_steps
from tensors import HALVES, dtype_name

from stepclock_ext import EMA, ClockedOptimizer

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
PAIRS = (
    "bfloat16 parameters go with float32 or bfloat16",
    "float16 with float32 or float16",
    "wider ones with their own dtype",
)


def parameters(*dtypes):
    return [torch.nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in dtypes]


def sgd(*dtypes, **options):
    return clocked_sgd(*parameters(*dtypes), gradient_accumulation_steps=2, **options)


@pytest.mark.parametrize(
    ("dtypes", "asked"),
    [
        ([BF16], FP16),
        ([BF16], FP64),
        ([BF16], torch.int32),
        ([BF16], torch.int8),
        ([BF16], torch.bool),
        ([BF16], torch.complex64),
        ([BF16], torch.float8_e4m3fn),
        ([FP16], BF16),
        ([FP16], FP64),
        ([FP16], torch.int16),
        ([FP32], BF16),
        ([FP32], FP16),
        ([FP32], FP64),
        ([FP32], torch.int32),
        ([FP64], BF16),
        ([torch.complex64], BF16),
        ([BF16, FP16], BF16),
        ([BF16, FP16], FP16),
        ([BF16, FP32], FP16),
        ([BF16, FP64], FP64),
        ([FP32, BF16, FP32], FP64),
    ],
    ids=str,
)
def test_a_pair_that_does_not_work_is_refused_with_the_pairs_that_do(dtypes, asked):
    with pytest.raises(ValueError, match=r"^ClockedOptimizer: accumulate_dtype must ") as caught:
        sgd(*dtypes, accumulate_dtype=asked)
    message = str(caught.value)
    assert f"got {asked} for " in message
    assert any(str(dtype) in message for dtype in dtypes)
    assert all(pair in message for pair in PAIRS)


@pytest.mark.parametrize(
    ("dtypes", "asked"),
    [
        ([BF16], None),
        ([BF16], FP32),
        ([BF16], BF16),
        ([FP16], FP32),
        ([FP16], FP16),
        ([FP32], FP32),
        ([FP32], None),
        ([FP64], FP64),
        ([BF16, FP16, FP32, FP64], FP32),
        ([BF16, FP32, FP64], BF16),
        ([FP16, FP32, torch.complex64], FP16),
        ([torch.complex64], FP32),
    ],
    ids=str,
)
def test_a_pair_that_works_trains_every_parameter(dtypes, asked):
    params = parameters(*dtypes)
    opt = clocked_sgd(*params, gradient_accumulation_steps=2, accumulate_dtype=asked)
    loss = sum((p.real if p.is_complex() else p).double().sum() for p in params)
    run_micro_steps(opt, loss, [1, 3])
    for p in params:
        assert p.tolist() == [-2.0] * 3


@pytest.mark.parametrize("asked", ["float32", "torch.float32", 32, float, True, torch.zeros(1)])
def test_what_is_no_dtype_is_refused_with_its_value(asked):
    with pytest.raises(TypeError, match="accumulate_dtype must be a torch dtype or None") as caught:
        sgd(BF16, accumulate_dtype=asked)
    assert repr(asked) in str(caught.value)


@pytest.mark.parametrize("second", [BF16, FP64], ids=dtype_name)
def test_the_parameters_of_every_optimizer_are_checked(second):
    inner = [torch.optim.SGD(parameters(dtype), lr=1.0) for dtype in (FP16, second)]
    with pytest.raises(ValueError, match=r"accumulate_dtype .* torch\.float64"):
        ClockedOptimizer(inner, accumulate_dtype=FP64)


@pytest.mark.parametrize("dtype", HALVES, ids=dtype_name)
def test_a_refused_wrapper_leaves_no_hook_on_the_parameters(dtype):
    (w,) = parameters(dtype)
    for options in ({"accumulate_dtype": FP64}, {"ema": 1}, {"noise_scale": 1}):
        with pytest.raises((TypeError, ValueError)):
            clocked_sgd(w, gradient_accumulation_steps=2, **options)
    w.sum().backward()
    assert w.grad.tolist() == [1.0] * 3


@pytest.mark.parametrize("dtype", HALVES, ids=dtype_name)
def test_lbfgs_takes_no_fp32_sums(dtype):
    (w,) = parameters(dtype)
    with pytest.raises(ValueError, match=r"accumulate_dtype .* LBFGS, got torch\.float32"):
        ClockedOptimizer(torch.optim.LBFGS([w]), accumulate_dtype=FP32)
    ClockedOptimizer(torch.optim.LBFGS([w]))
    ClockedOptimizer(torch.optim.LBFGS(parameters(FP32)), accumulate_dtype=FP32)


class Mine(torch.optim.AdamW):
    """A user's own."""


WITHOUT_RULE = {
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.1),
    "LBFGS": torch.optim.LBFGS,
    "Mine": Mine,
}


@pytest.mark.parametrize("name", WITHOUT_RULE)
@pytest.mark.parametrize("options", [{"master_weights": True}, {"rounding": "stochastic"}], ids=str)
def test_what_only_a_fused_rule_can_do_is_refused_to_others_with_the_ones_that_can(name, options):
    (asked, value) = next(iter(options.items()))
    with pytest.raises(ValueError, match=re.escape(f"{asked}={value!r}")) as caught:
        ClockedOptimizer(WITHOUT_RULE[name](parameters(BF16)), **options)
    assert f"got {name}" in str(caught.value)
    assert "Adam, AdamW, SGD" in str(caught.value)
    ClockedOptimizer(WITHOUT_RULE[name](parameters(BF16)))


def test_one_optimizer_without_a_rule_among_several_is_enough():
    inner = [torch.optim.AdamW(parameters(BF16)), torch.optim.Adagrad(parameters(BF16))]
    with pytest.raises(ValueError, match=r"master_weights=True .* Adagrad"):
        ClockedOptimizer(inner, master_weights=True)


@pytest.mark.parametrize("value", [1, 0, None, "yes", torch.float32, torch.ones(1)])
def test_masters_are_wanted_or_not(value):
    with pytest.raises(TypeError, match="master_weights must be True or False") as caught:
        sgd(BF16, master_weights=value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", ["up", "", None, True, 1])
def test_a_rounding_that_does_not_exist_is_refused_with_those_that_do(value):
    with pytest.raises(ValueError, match="rounding must be one of 'nearest', 'stochastic'") as info:
        sgd(BF16, rounding=value)
    assert repr(value) in str(info.value)


def test_masters_leave_nothing_to_round_stochastically():
    with pytest.raises(ValueError, match=r"rounding .* master_weights=True, got 'stochastic'"):
        sgd(BF16, master_weights=True, rounding="stochastic")


@pytest.mark.parametrize("value", [0.99, True, EMA, "0.99", torch.ones(1)])
def test_an_average_is_an_ema_or_none(value):
    with pytest.raises(TypeError, match="ema must be an EMA or None") as caught:
        sgd(BF16, ema=value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", [1, 0, None, "yes", 2.0])
def test_the_noise_scale_is_wanted_or_not(value):
    with pytest.raises(TypeError, match="noise_scale must be True or False") as caught:
        sgd(BF16, noise_scale=value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("norm_type", [math.inf, 1.0, 3.0])
def test_the_noise_scale_is_made_of_squared_norms(norm_type):
    with pytest.raises(
        ValueError, match=f"noise_scale must go with norm_type=2.0, got {norm_type}"
    ):
        sgd(BF16, noise_scale=True, norm_type=norm_type)
    sgd(BF16, noise_scale=False, norm_type=norm_type)
