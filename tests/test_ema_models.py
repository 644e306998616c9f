"""Averages of models that lie in memory otherwise, change their dtype, or are copied."""

import copy

import pytest
import torch
from helpers import each_backend
from sixteen_bit import MAKERS, given
from tensors import dtype_name
from tolerance import assert_all_bit_equal, assert_close

from stepclock_ext import EMA, ClockedOptimizer


def averages_of(ema, params):
    return [ema.average(p).clone() for p in params]


@each_backend
@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_how_a_parameter_lies_in_memory_changes_no_average(dtype, masters, backend):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4, 6, 3, 5, generator=generator).to(dtype)
    grads = torch.randn(4, 4, 6, 3, 5, generator=generator).to(dtype)
    gap = torch.empty(4, 6, 3, 10, dtype=dtype)[..., ::2]
    lying = {
        "contiguous": values.clone(),
        "channels_last": values.clone(memory_format=torch.channels_last),
        "transposed": values.transpose(0, 3).contiguous().transpose(0, 3),
        "gaps": gap.copy_(values),
    }
    if masters:
        del lying["gaps"]  # no kernel walks it
    ends = []
    for tensor in lying.values():
        p, ema = torch.nn.Parameter(tensor), EMA(decay=0.5)
        inner = torch.optim.SGD([p], lr=0.125)
        opt = ClockedOptimizer(inner, master_weights=masters, ema=ema, backend=backend)
        for grad in grads:
            opt.backward(given((p, grad)))
            opt.step()
        assert p.stride() == tensor.stride()
        ends.append((ema.average(p), p.detach()))
    for average, p in ends[1:]:
        assert_close(average, ends[0][0], num_roundings=12)
        assert_close(p, ends[0][1], num_roundings=4)


@each_backend
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=dtype_name)
def test_a_model_that_changes_its_dtype_keeps_its_averages_moving(dtype, backend):
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(3))])
    ema = EMA(decay=0.5)
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    opt = ClockedOptimizer(inner, ema=ema, backend=backend)
    for number in range(4):
        opt.backward(model[0].sum())
        assert opt.step().updated
        if number == 0:
            model.to(dtype)
    expected = 1.0
    for update in range(1, 5):
        expected = (expected + 1 - 0.5 * update) / 2
    assert ema.average(model[0]).tolist() == [expected] * 3


@each_backend
def test_copies_of_model_and_optimizer_have_averages_of_their_own(backend):
    model = torch.nn.Linear(3, 2)
    ema = EMA(decay=0.5)
    opt = ClockedOptimizer(MAKERS["AdamW"](model.parameters()), ema=ema, backend=backend)

    def train(model, opt):
        opt.backward(model(torch.ones(3)).square().sum())
        assert opt.step().updated

    train(model, opt)
    other, other_opt, other_ema = copy.deepcopy((model, opt, ema))
    mine, theirs = list(model.parameters()), list(other.parameters())
    before = averages_of(ema, mine)
    assert_all_bit_equal(averages_of(other_ema, theirs), before)
    train(other, other_opt)
    assert_all_bit_equal(averages_of(ema, mine), before)
    assert not torch.equal(other_ema.average(other.weight), before[0])
    train(model, opt)
    assert_all_bit_equal(averages_of(other_ema, theirs), averages_of(ema, mine))
