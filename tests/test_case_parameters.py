"""Cases 36, 39 and 44: absent gradients, complex parameters, groups that come later."""

import math
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
)
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LinearLR, OneCycleLR, StepLR
from torch.utils.checkpoint import checkpoint

from stepclock_ext import ClockedOptimizer

# 36: no gradient is not a gradient of zero.


@each_optimizer
@each_backend
def test_a_parameter_without_a_gradient_stays_as_it_is(make_optimizer, backend):
    p, q = parameter(1.0), parameter(1.0)
    opt = ClockedOptimizer(make_optimizer([p, q]), backend=backend, max_grad_norm=1.0)
    opt.backward(p + q)
    opt.step()
    before = deepcopy((q, opt.state[q]))
    opt.backward(3 * p)
    assert opt.step().grad_norm == 3.0
    assert len(opt.state) == 2
    torch.testing.assert_close((q, opt.state[q]), before, rtol=0.0, atol=0.0)


@each_backend
@pytest.mark.parametrize(("second", "after"), [(None, 0.89000005), (0.0, 0.8140942)])
def test_no_gradient_moves_nothing_and_a_gradient_of_zero_moves_by_momentum(backend, second, after):
    p, q = parameter(1.0), parameter(1.0)
    inner = torch.optim.AdamW([p, q], lr=0.1, weight_decay=0.1)
    opt = ClockedOptimizer(inner, backend=backend)
    opt.backward(p + q)
    opt.step()
    opt.backward(p if second is None else p + second * q)
    opt.step()
    assert_close(q, after)
    assert inner.state[q]["step"] == (1 if second is None else 2)


@each_backend
@pytest.mark.parametrize("size", [(), (70_001,)])
@pytest.mark.parametrize("used_in", [0, 1])
def test_a_parameter_used_in_one_micro_step_of_two_gets_half(backend, size, used_in):
    p, q = (torch.nn.Parameter(torch.zeros(size)) for _ in range(2))
    opt = clocked_sgd(p, q, gradient_accumulation_steps=2, backend=backend)
    for micro in range(2):
        loss = 3 * p.sum() + (4 * q.sum() if micro == used_in else 0)
        opt.backward(loss)
        info = opt.step()
    assert_close(q, torch.full(size, -2.0))
    assert_close(p, torch.full(size, -3.0))
    assert info.grad_norm == pytest.approx(math.sqrt(13 * p.numel()), rel=1e-6)


@each_backend
def test_a_parameter_unfrozen_later_begins_with_its_own_first_step(backend):
    p, q = parameter(1.0), parameter(1.0)
    q.requires_grad_(False)
    inner = torch.optim.AdamW([p, q], lr=0.1, weight_decay=0.1)
    opt = ClockedOptimizer(inner, gradient_accumulation_steps=2, backend=backend)
    run_micro_steps(opt, p, [1] * 10)
    assert q.item() == 1.0
    assert q not in inner.state
    q.requires_grad_(True)
    for _ in range(2):
        opt.backward(p + q)
        opt.step()
    assert opt.clock.update_step == 6
    assert (inner.state[p]["step"], inner.state[q]["step"]) == (6, 1)
    assert_close(q, 0.89)


def test_a_parameter_that_is_frozen_later_stays():
    p, q = parameter(1.0), parameter(1.0)
    opt = ClockedOptimizer(torch.optim.SGD([p, q], lr=1.0, momentum=0.9, weight_decay=0.1))
    opt.backward(p + q)
    opt.step()
    q.requires_grad_(False)
    frozen = q.item()
    run_micro_steps(opt, p, [1, 1])
    assert q.item() == frozen


@each_backend
@pytest.mark.parametrize("num_features", [3, 300])  # 300 * 300 elements ride
def test_tied_parameters_are_one_parameter(backend, num_features):
    first = torch.nn.Linear(num_features, num_features, bias=False)
    second = torch.nn.Linear(num_features, num_features, bias=False)
    second.weight = first.weight
    model = torch.nn.Sequential(first, second)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    opt = ClockedOptimizer(inner, gradient_accumulation_steps=2, model=model, backend=backend)
    start = first.weight.detach().double().requires_grad_()
    x = torch.randn(4, num_features, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        opt.backward(model(x).mean())
        info = opt.step()
    (x.double() @ start.T @ start.T).mean().backward()
    expected = (start - start.grad).detach()
    assert_close(first.weight, expected, num_roundings=2 * num_features)
    assert info.grad_norm == pytest.approx(start.grad.norm().item(), rel=1e-5)


def assert_gaps_train_alike(make_optimizer, make_plain, backend):
    used = [(0,), (0, 1), (2,), (0, 1, 2), (1,), (0, 2)]  # by window; 1 and 2 join late
    ours, theirs = ([parameter(1.0, 2.0), parameter(3.0), parameter(-1.0)] for _ in range(2))
    groups = [[{"params": ps[:2]}, {"params": ps[2:], "lr": 0.01}] for ps in (ours, theirs)]
    opt = ClockedOptimizer(
        make_optimizer(groups[0]), gradient_accumulation_steps=2, backend=backend
    )
    plain = make_plain(groups[1])
    for window, rows in enumerate(used):
        for micro in (1, 3):
            opt.backward(sum((micro * ours[row] ** 2).sum() for row in rows))
            opt.step()
        plain.zero_grad()
        sum((2 * theirs[row] ** 2).sum() for row in rows).backward()
        plain.step()
        for p, q in zip(ours, theirs, strict=True):
            assert_close(p, q, num_roundings=16 * (window + 1))


@each_backend
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "sgd_fused"])
def test_gradients_that_come_and_go_train_as_in_the_plain_loop(name, backend):
    assert_gaps_train_alike(OPTIMIZERS[name], OPTIMIZERS[name], backend)


@each_backend
def test_fused_sgd_takes_parameters_that_join_late_which_torch_does_not(backend):
    assert_gaps_train_alike(OPTIMIZERS["sgd_fused"], OPTIMIZERS["sgd"], backend)


@each_backend
@pytest.mark.parametrize("num_features", [3, 300])
def test_a_parameter_that_one_backward_reaches_twice_gets_both_gradients(backend, num_features):
    layer = torch.nn.Linear(num_features, num_features, bias=False)
    torch.nn.init.zeros_(layer.weight)
    opt = clocked_sgd(layer.weight, gradient_accumulation_steps=2, backend=backend)
    x = torch.ones(1, num_features, requires_grad=True)
    for c in (1, 3):
        parts = (checkpoint(layer, x, use_reentrant=True) for _ in range(2))
        opt.backward(c * sum(part.sum() for part in parts))
        info = opt.step()
    assert_close(layer.weight, torch.full((num_features, num_features), -4.0))
    assert_close(info.grad_norm, 4.0 * num_features)


# 39: complex parameters.


@each_backend
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize(("norm_type", "norm"), [(2.0, 5.0), (math.inf, 5.0), (3.0, 5.0)])
def test_a_complex_gradient_of_3_plus_4j_has_norm_5(backend, dtype, norm_type, norm):
    w = torch.nn.Parameter(torch.zeros((), dtype=dtype))
    opt = clocked_sgd(w, max_grad_norm=1.0, norm_type=norm_type, backend=backend)
    opt.backward(given((w, 3 + 4j)))
    assert_close(opt.step().grad_norm, norm)
    assert_close(w, -(3 + 4j) * clip_factor(norm, 1.0))


@each_backend
@pytest.mark.parametrize("bad", [complex(1, math.inf), complex(math.nan, 1)])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_an_overflow_in_either_part_of_a_complex_gradient_is_found(backend, bad, norm_type):
    w = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    opt = clocked_sgd(w, norm_type=norm_type, backend=backend)
    w.grad = torch.tensor([1 + 1j, bad])
    assert opt.step().skipped
    assert w.tolist() == [0, 0]


@each_backend
@pytest.mark.parametrize("size", [(), (70_001,)])
def test_complex_gradients_accumulate_to_their_mean(backend, size):
    w = torch.nn.Parameter(torch.zeros(size, dtype=torch.complex64))
    opt = clocked_sgd(w, gradient_accumulation_steps=2, backend=backend)
    for c in (1 + 1j, 3 - 1j):
        opt.backward((w * complex(c).conjugate()).real.sum())
        opt.step()
    assert_close(w, torch.full(size, -2 + 0j))


@each_backend
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adam, torch.optim.RMSprop])
def test_complex_parameters_move_as_without_the_wrapper(backend, optimizer):
    p, q = (torch.nn.Parameter(torch.tensor([1 + 2j, 3 - 1j])) for _ in range(2))
    opt, plain = ClockedOptimizer(optimizer([p], lr=0.1), backend=backend), optimizer([q], lr=0.1)
    for gradient in ([3 + 4j, -1j], [0.5, 2 + 2j]):
        opt.backward(given((p, gradient)))
        opt.step()
        q.grad = torch.tensor(gradient, dtype=torch.complex64)
        plain.step()
    assert_close(p, q, num_roundings=16)


# 44: groups added during training.


@pytest.mark.parametrize("built_on", ["inner", "wrapper"])
def test_a_group_added_later_joins_the_schedule_at_its_own_base_rate(built_on):
    p, q = parameter(1.0), parameter(1.0)
    opt = clocked_sgd(p, lr=0.1)
    owner = opt if built_on == "wrapper" else opt.optimizers[0]
    opt.attach(LambdaLR(owner, lambda t: 1 / (1 + t)))
    run_micro_steps(opt, p, [1, 1])
    opt.add_param_group({"params": [q], "lr": 0.01})
    opt.backward(3 * p + 4 * q)
    info = opt.step()
    assert info.grad_norm == 5.0
    assert info.lr == pytest.approx((0.1 / 3, 0.01 / 3))
    assert_close(q, 1 - 4 * 0.01 / 3)
    assert [group["lr"] for group in opt.param_groups] == pytest.approx([0.025, 0.0025])


SCHEDULERS = [
    lambda o: StepLR(o, step_size=1),
    lambda o: LinearLR(o, total_iters=4),
    lambda o: ExponentialLR(o, gamma=0.9),
    lambda o: OneCycleLR(o, max_lr=1.0, total_steps=9, cycle_momentum=False),
]


@pytest.mark.parametrize("make_scheduler", SCHEDULERS, ids=["step", "linear", "exp", "one_cycle"])
def test_a_scheduler_that_cannot_take_a_group_says_so_at_the_call(make_scheduler):
    p, q = parameter(1.0), parameter(1.0)
    inner = torch.optim.SGD([p], lr=0.1)
    opt = ClockedOptimizer(inner, schedulers=[make_scheduler(inner)])
    run_micro_steps(opt, p, [1, 1])
    with pytest.raises(RuntimeError, match="cannot take a group"):
        opt.add_param_group({"params": [q], "lr": 0.01})
    assert len(opt.param_groups) == 1
    assert run_micro_steps(opt, p, [1]).updated


def test_a_group_is_not_added_inside_a_window():
    p, q = parameter(1.0), parameter(1.0)
    opt = clocked_sgd(p, gradient_accumulation_steps=2)
    run_micro_steps(opt, p, [1])
    with pytest.raises(RuntimeError, match="window is open"):
        opt.add_param_group({"params": [q]})
    run_micro_steps(opt, p, [1])
    opt.add_param_group({"params": [q]})
    for _ in range(2):
        opt.backward(3 * p + 4 * q)
        info = opt.step()
    assert info.grad_norm == 5.0
    assert_close(q, 1 - 4.0)


def test_a_group_added_to_the_inner_optimizer_is_seen():
    p, q = parameter(1.0), parameter(1.0)
    opt = clocked_sgd(p, max_grad_norm=1.0)
    run_micro_steps(opt, p, [1])
    opt.optimizers[0].add_param_group({"params": [q]})
    opt.backward(3 * p + 4 * q)
    assert opt.step().grad_norm == 5.0
    assert_close(q, 1 - 4.0 * clip_factor(5.0, 1.0))
