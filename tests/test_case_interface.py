"""Cases 45, 48 and 51: what torch, schedulers and users expect of an optimizer."""

import io
import pickle
from copy import deepcopy

import pytest
import torch
from helpers import (
    OPTIMIZERS,
    assert_close,
    clip_factor,
    clocked_sgd,
    each_backend,
    each_optimizer,
    given,
    parameter,
    run_micro_steps,
    snapshot,
)
from tolerance import assert_all_bit_equal, assert_same_state
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR

from stepclock_ext import ClockedOptimizer, LossScale

INF = float("inf")


def adamw_and_sgd(p, q):
    return [torch.optim.AdamW([p], lr=0.1), torch.optim.SGD([q], lr=1.0, momentum=0.9)]


# 45: several optimizers.


def test_an_overflow_in_one_of_two_optimizers_is_one_skip_and_one_back_off_for_both():
    p, q = parameter(1.0), parameter(1.0)
    inner = adamw_and_sgd(p, q)
    schedulers = [StepLR(each, step_size=1) for each in inner]
    scale = LossScale(init_scale=4.0)
    opt = ClockedOptimizer(inner, loss_scale=scale, schedulers=schedulers)
    opt.backward(given((p, INF), (q, 1.0)))
    assert opt.step().skipped
    assert (opt.clock.update_step, opt.clock.skipped_updates) == (0, 1)
    assert opt.loss_scale.scale == 2.0
    assert [scheduler.last_epoch for scheduler in schedulers] == [0, 0]
    assert (p.item(), q.item()) == (1.0, 1.0)


def test_two_wrappers_share_nothing():
    p, q = parameter(1.0), parameter(1.0)
    first, second = (clocked_sgd(w, loss_scale=LossScale(init_scale=4.0)) for w in (p, q))
    schedulers = [StepLR(opt.optimizers[0], step_size=1) for opt in (first, second)]
    for opt, scheduler in zip((first, second), schedulers, strict=True):
        opt.attach(scheduler)
    first.backward(INF * p)
    second.backward(q)
    assert first.step().skipped
    assert second.step().updated
    assert (first.loss_scale.scale, second.loss_scale.scale) == (2.0, 4.0)
    assert (first.clock.update_step, first.clock.skipped_updates) == (0, 1)
    assert (second.clock.update_step, second.clock.skipped_updates) == (1, 0)
    assert [scheduler.last_epoch for scheduler in schedulers] == [0, 1]
    assert_close(q, 0.0)


@pytest.mark.parametrize("loss_scale", [None, LossScale(init_scale=4.0)])
def test_an_optimizer_without_any_gradient_neither_updates_nor_skips(loss_scale):
    opt = clocked_sgd(parameter(1.0), loss_scale=loss_scale)
    info = opt.step()
    assert (info.updated, info.skipped) == (False, False)
    assert (opt.clock.update_step, opt.clock.skipped_updates) == (0, 0)
    assert opt.loss_scale == loss_scale


def test_an_inner_optimizer_without_a_gradient_stays_as_it_is():
    p, q = parameter(1.0), parameter(1.0)
    inner = adamw_and_sgd(p, q)
    opt = ClockedOptimizer(inner)
    opt.backward(3 * q)
    assert opt.step().updated
    assert p.item() == 1.0
    assert not inner[0].state
    assert_close(q, -2.0)


@each_backend
@pytest.mark.parametrize(
    "names",
    [("adamw", "sgd"), ("rmsprop", "adagrad"), ("sgd", "rmsprop"), ("adagrad_fused", "adamax")],
    ids="+".join,
)
def test_two_optimizers_under_one_clock_move_as_two_plain_ones(names, backend):
    ours, theirs = ([parameter(1.0, 2.0) for _ in names] for _ in range(2))
    inner, plain = (
        [OPTIMIZERS[name]([w]) for name, w in zip(names, ws, strict=True)] for ws in (ours, theirs)
    )
    opt = ClockedOptimizer(inner, max_grad_norm=1.0, backend=backend)
    for gradient in ([3.0, 0.0], [-1.0, 2.0], [0.1, 0.2]):
        gradients = (torch.tensor(gradient), torch.tensor([4.0, 1.0]))
        opt.backward(given(*zip(ours, gradients, strict=True)))
        opt.step()
        for w, grad in zip(theirs, gradients, strict=True):
            w.grad = grad.clone()
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        for optimizer in plain:
            optimizer.step()
    for p, q in zip(ours, theirs, strict=True):
        assert_close(p, q, num_roundings=16)
    assert opt.clock.update_step == 3


def test_a_scheduler_on_the_wrapper_moves_the_rates_of_both_optimizers():
    p, q = parameter(1.0), parameter(1.0)
    opt = ClockedOptimizer(adamw_and_sgd(p, q))
    scheduler = StepLR(opt, step_size=1, gamma=0.5)
    opt.attach(scheduler)
    run_micro_steps(opt, p, [1, 1])
    assert [group["lr"] for group in opt.param_groups] == pytest.approx([0.025, 0.25])
    assert scheduler.last_epoch == 2


def test_two_optimizers_resume_inside_a_window():
    def build(p, q):
        return ClockedOptimizer(adamw_and_sgd(p, q), gradient_accumulation_steps=2)

    def run(opt, p, q, slopes):
        for c in slopes:
            opt.backward(c * p * p + q * q)
            opt.step()

    p, q = parameter(1.0), parameter(2.0)
    opt = build(p, q)
    run(opt, p, q, [1, 2, 3])
    r, s = parameter(p.item()), parameter(q.item())
    resumed = build(r, s)
    resumed.load_state_dict(pickle.loads(pickle.dumps(opt.state_dict())))
    run(opt, p, q, [4, 5, 6])
    run(resumed, r, s, [4, 5, 6])
    assert_all_bit_equal(snapshot(resumed), snapshot(opt))


# 48: identity, copies, pickles.


def test_the_wrapper_is_an_optimizer_with_the_groups_and_the_state_of_the_inner_one():
    w = parameter(1.0)
    inner = torch.optim.AdamW([w], lr=0.1)
    opt = ClockedOptimizer(inner)
    run_micro_steps(opt, w, [1])
    assert isinstance(opt, torch.optim.Optimizer)
    assert opt.param_groups is inner.param_groups
    assert opt.state is inner.state
    assert opt.defaults is inner.defaults


@pytest.mark.parametrize("changed", ["inner", "wrapper"])
def test_schedulers_on_either_object_change_the_same_rate(changed):
    w = parameter(1.0)
    inner = torch.optim.SGD([w], lr=1.0)
    opt = ClockedOptimizer(inner)
    scheduler = LambdaLR(opt if changed == "wrapper" else inner, lambda t: 0.5**t)
    run_micro_steps(opt, w, [1])
    scheduler.step()
    assert inner.param_groups[0]["lr"] == opt.param_groups[0]["lr"] == 0.5
    run_micro_steps(opt, w, [1])
    assert_close(w, -0.5)


def train(model, opt, num_micro_steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_micro_steps):
        x = torch.randn(4, next(model.parameters()).shape[1], generator=generator)
        opt.backward(model(x).square().mean())
        opt.step()


@pytest.mark.parametrize("num_features", [2, 300])  # 300 * 300 elements ride
@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize(
    "copy", [deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["deepcopy", "pickle"]
)
def test_a_copy_made_inside_a_window_finishes_it_alike_and_apart(
    num_features, make_optimizer, copy
):
    model = torch.nn.Linear(num_features, num_features)
    inner = make_optimizer(model.parameters(), lr=0.01)
    opt = ClockedOptimizer(
        inner,
        gradient_accumulation_steps=2,
        max_grad_norm=0.1,
        loss_scale=LossScale(init_scale=8.0),
        schedulers=[StepLR(inner, step_size=1, gamma=0.9)],
    )
    train(model, opt, 3)
    other_model, other = copy((model, opt))
    before = snapshot(opt)
    train(other_model, other, 3, seed=1)
    assert_all_bit_equal(snapshot(opt), before)
    assert opt.param_groups[0]["lr"] == pytest.approx(0.009)
    train(model, opt, 3, seed=1)
    assert_all_bit_equal(snapshot(other), snapshot(opt))
    assert other.param_groups[0]["lr"] == opt.param_groups[0]["lr"] == pytest.approx(0.01 * 0.9**3)


@each_optimizer
def test_a_state_dict_survives_a_file_key_by_key(make_optimizer):
    p = parameter(1.0, 2.0)
    opt = ClockedOptimizer(
        make_optimizer([p]), gradient_accumulation_steps=2, loss_scale=LossScale(init_scale=8.0)
    )
    run_micro_steps(opt, p, [1, 2, 3])
    state, file = opt.state_dict(), io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    for loaded in (torch.load(file, weights_only=True), pickle.loads(pickle.dumps(state))):
        assert_same_state(loaded, state)


# 51: flags per group, empty groups.


@each_backend
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_flags_of_single_groups_change_no_result(backend, optimizer):
    p, q, r, s = (parameter(1.0, 2.0) for _ in range(4))

    def build(first, second):
        groups = [{"params": [first], "fused": True}, {"params": [second], "foreach": True}]
        return optimizer(groups, lr=0.1)

    opt, plain = ClockedOptimizer(build(p, q), backend=backend), build(r, s)
    for gradient in ([3.0, 4.0], [-1.0, 0.5], [0.1, 0.2]):
        opt.backward(given((p, gradient), (q, gradient)))
        opt.step()
        r.grad, s.grad = torch.tensor(gradient), torch.tensor(gradient)
        plain.step()
    for ours, theirs in ((p, r), (q, s)):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-7)


@each_optimizer
@pytest.mark.parametrize("place", [0, 1])
def test_an_empty_group_changes_no_count(make_optimizer, place):
    p = parameter(1.0)
    groups = [{"params": [p]}]
    groups.insert(place, {"params": []})
    opt = ClockedOptimizer(make_optimizer(groups), max_grad_norm=1.0)
    assert len(run_micro_steps(opt, p, [5]).lr) == 2
    assert opt.state_dict()["stepclock"]["clock"]["update_step"] == 1
    assert len(opt.state_dict()["param_groups"]) == 2


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_differentiable_is_refused(optimizer):
    with pytest.raises(ValueError, match="differentiable"):
        ClockedOptimizer(optimizer([parameter(1.0)], lr=0.1, differentiable=True))


@each_backend
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_a_rate_in_a_tensor_is_read_anew_for_each_update(backend, optimizer):
    p, q = parameter(1.0), parameter(1.0)
    opt = ClockedOptimizer(optimizer([p], lr=torch.tensor(0.1)), backend=backend)
    plain = optimizer([q], lr=torch.tensor(0.1))
    for _ in range(3):
        run_micro_steps(opt, p, [2])
        q.grad = torch.tensor(2.0)
        plain.step()
        for optimizer_ in (opt, plain):
            optimizer_.param_groups[0]["lr"].mul_(0.5)
    assert_close(p, q, num_roundings=16)


@each_backend
@pytest.mark.parametrize("name", ["sgd", "sgd_fused", "adam", "adamw", "rmsprop"])
def test_a_scheduler_that_moves_the_momentum_moves_it_for_the_update(name, backend):
    p, q = parameter(1.0, 2.0), parameter(1.0, 2.0)
    inner, plain = OPTIMIZERS[name]([p]), OPTIMIZERS[name]([q])
    ours, theirs = (OneCycleLR(o, max_lr=0.1, total_steps=6) for o in (inner, plain))
    opt = ClockedOptimizer(inner, schedulers=[ours], backend=backend)
    for gradient in ([1.0, 2.0], [-3.0, 1.0], [0.5, 0.25], [2.0, 2.0]):
        opt.backward(given((p, gradient)))
        opt.step()
        q.grad = torch.tensor(gradient)
        plain.step()
        theirs.step()
    assert_close(p, q, num_roundings=64)


def test_settings_changed_in_a_group_hold_from_the_next_update():
    w = parameter(0.0)
    opt = clocked_sgd(w, max_grad_norm=1.0)
    run_micro_steps(opt, w, [5])
    opt.param_groups[0].update(lr=2.0, weight_decay=0.5)
    run_micro_steps(opt, w, [5])
    first = -5 * clip_factor(5.0, 1.0)
    assert_close(w, first - 2 * (5 * clip_factor(5.0, 1.0) + 0.5 * first))
