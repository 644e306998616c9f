"""Section 6 of the design: what a wrapper saves, and that a resumed run is the run."""

import io
import math

import pytest
import torch
from helpers import (
    OPTIMIZERS,
    assert_close,
    clocked_sgd,
    counters,
    each_optimizer,
    given,
    parameter,
    run_micro_steps,
    snapshot,
)
from tolerance import assert_all_bit_equal
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from stepclock_ext import ClockedOptimizer, LossScale

NAN = math.nan


def build(p, make_optimizer=OPTIMIZERS["adamw"]):
    inner = make_optimizer([p])
    schedulers = [LambdaLR(inner, lambda t: 1 / (1 + t)), ReduceLROnPlateau(inner, patience=0)]
    return ClockedOptimizer(
        inner,
        gradient_accumulation_steps=4,
        max_grad_norm=1.0,
        loss_scale=LossScale(init_scale=1024.0, growth_interval=2),
        schedulers=schedulers,
    )


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_resumed_run_is_bit_identical(make_optimizer, size, saved_after):
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(size, generator=generator) for _ in range(12)]

    def run(opt, p, micro_steps):
        infos = []
        for micro in micro_steps:
            opt.backward((batches[micro] * p * p).sum(), weight=1 + micro % 3)
            infos.append(opt.step())
        return infos

    p = torch.nn.Parameter(torch.ones(size))
    opt = build(p, make_optimizer)
    run(opt, p, range(saved_after))
    q, state = torch.nn.Parameter(p.detach().clone()), through_a_file(opt.state_dict())
    resumed = build(q, make_optimizer)
    resumed.load_state_dict(state)
    assert run(resumed, q, range(saved_after, 12)) == run(opt, p, range(saved_after, 12))
    assert_all_bit_equal(snapshot(resumed), snapshot(opt))
    assert counters(resumed.clock) == counters(opt.clock)
    assert resumed.loss_scale == opt.loss_scale


@each_optimizer
@pytest.mark.parametrize("saved_after", [4, 6, 7])
def test_a_run_resumed_inside_a_window_is_bit_identical(make_optimizer, saved_after):
    assert_resumed_run_is_bit_identical(make_optimizer, (3,), saved_after)


@pytest.mark.parametrize("name", ["adamw", "sgd", "rmsprop"])
@pytest.mark.parametrize("saved_after", [4, 6, 7])
def test_a_large_run_resumed_inside_a_window_is_bit_identical(name, saved_after):
    assert_resumed_run_is_bit_identical(OPTIMIZERS[name], (70_001,), saved_after)


def test_the_growth_of_the_scale_goes_on_where_it_was():
    w = parameter(1.0)
    scale = LossScale(init_scale=1024.0, growth_interval=2)
    opt = clocked_sgd(w, loss_scale=scale)
    run_micro_steps(opt, w, [1])
    resumed = clocked_sgd(w, loss_scale=LossScale(growth_interval=2))
    resumed.load_state_dict(through_a_file(opt.state_dict()))
    assert (resumed.loss_scale.scale, resumed.loss_scale.good_steps) == (1024.0, 1)
    run_micro_steps(resumed, w, [1])
    assert resumed.loss_scale.scale == 2048.0


def test_the_skips_in_a_row_go_on_where_they_were():
    w = parameter(1.0)
    opt = clocked_sgd(w, max_consecutive_skips=2)
    run_micro_steps(opt, w, [NAN])
    resumed = clocked_sgd(w, max_consecutive_skips=2)
    resumed.load_state_dict(through_a_file(opt.state_dict()))
    with pytest.raises(RuntimeError, match="2 skips"):
        run_micro_steps(resumed, w, [NAN])


@each_optimizer
def test_the_state_loads_into_the_bare_optimizer_and_back(make_optimizer):
    p, q, r = (parameter(1.0, 2.0) for _ in range(3))
    opt = ClockedOptimizer(make_optimizer([p]))
    bare, again = make_optimizer([q]), ClockedOptimizer(make_optimizer([r]))
    gradients = ([3.0, 4.0], [-1.0, 0.5], [0.25, -2.0])
    opt.backward(given((p, gradients[0])))
    opt.step()
    with torch.no_grad():
        q.copy_(p)
    bare.load_state_dict(through_a_file(opt.state_dict()))
    q.grad = torch.tensor(gradients[1])
    bare.step()
    with torch.no_grad():
        r.copy_(q)
    again.load_state_dict(through_a_file(bare.state_dict()))
    for each, w in ((opt, p), (again, r)):
        for gradient in gradients[1:] if each is opt else gradients[2:]:
            each.backward(given((w, gradient)))
            each.step()
    assert_close(r, p, num_roundings=16)


def test_a_state_holds_tensors_and_plain_python_values():
    def assert_plain(value):
        if isinstance(value, dict):
            assert type(value) is dict
            for key, item in value.items():
                assert type(key) in (str, int)
                assert_plain(item)
        elif type(value) in (list, tuple):
            for item in value:
                assert_plain(item)
        else:
            assert type(value) in (torch.Tensor, int, float, str, bool, type(None)), value

    p = parameter(1.0, 2.0)
    opt = build(p)
    run_micro_steps(opt, p, [1] * 6)
    opt.report_metric(1.0)
    assert_plain(opt.state_dict())


def test_a_state_of_other_groups_is_refused_and_changes_nothing():
    p, q = parameter(1.0), parameter(1.0)
    opt = clocked_sgd(p, gradient_accumulation_steps=2)
    run_micro_steps(opt, p, [1, 1, 5])
    before = counters(opt.clock)
    with pytest.raises(ValueError, match="groups"):
        opt.load_state_dict(clocked_sgd(p, q).state_dict())
    assert counters(opt.clock) == before
    run_micro_steps(opt, p, [7])
    assert_close(p, 1 - 1.0 - 6.0)
