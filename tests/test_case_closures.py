"""Case 46: closures, run once in a micro step or as often as LBFGS needs."""

import pytest
import torch
from helpers import assert_close, clocked_sgd, each_optimizer, parameter

from stepclock_ext import ClockedOptimizer, LossScale


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2},
        {"loss_scale": 4.0},
        {"loss_scale": LossScale()},
    ],
)
def test_lbfgs_is_refused_at_construction_where_it_cannot_be_right(options):
    with pytest.raises(ValueError, match="LBFGS"):
        ClockedOptimizer(torch.optim.LBFGS([parameter(1.0)]), **options)


def test_lbfgs_is_refused_when_it_stops_being_right():
    opt = ClockedOptimizer(torch.optim.LBFGS([parameter(1.0)]))
    with pytest.raises(ValueError, match="LBFGS"):
        opt.gradient_accumulation_steps = 2
    with pytest.raises(ValueError, match="LBFGS"):
        opt.loss_scale = 4.0
    assert (opt.gradient_accumulation_steps, opt.loss_scale) == (1, None)


def test_lbfgs_beside_another_optimizer_is_refused():
    inner = [torch.optim.LBFGS([parameter(1.0)]), torch.optim.SGD([parameter(1.0)], lr=1.0)]
    with pytest.raises(ValueError, match="LBFGS"):
        ClockedOptimizer(inner)


def test_lbfgs_without_a_closure_is_a_clear_error():
    w = parameter(1.0)
    opt = ClockedOptimizer(torch.optim.LBFGS([w]))
    with pytest.raises((TypeError, RuntimeError), match="closure"):
        opt.step()


@pytest.mark.parametrize("plain_backward", [True, False])
@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_in_windows_of_one_goes_where_the_bare_one_goes(plain_backward, line_search):
    target = torch.tensor([1.0, -2.0, 3.0])
    p, q = parameter(0.0, 0.0, 0.0), parameter(0.0, 0.0, 0.0)
    inner = torch.optim.LBFGS([p], max_iter=4, line_search_fn=line_search)
    bare = torch.optim.LBFGS([q], max_iter=4, line_search_fn=line_search)
    opt = ClockedOptimizer(inner)

    def loss_at(x):
        return ((x - target) ** 4 + (x - target) ** 2).sum()

    def ours():
        opt.zero_grad()
        loss = loss_at(p)
        loss.backward() if plain_backward else opt.backward(loss)
        return loss

    def theirs():
        bare.zero_grad()
        loss = loss_at(q)
        loss.backward()
        return loss

    for _ in range(3):
        info, first_loss = opt.step(ours), bare.step(theirs)
        assert info.updated
        assert info.loss == pytest.approx(first_loss.item())
    assert_close(p, q)
    assert (opt.clock.micro_step, opt.clock.update_step) == (3, 3)


def lbfgs_and_closure(p, fail_at=None, bad_at=None):
    """LBFGS under a clock, its closure, and the evaluations so far."""
    opt, evaluations = ClockedOptimizer(torch.optim.LBFGS([p], max_iter=4)), []

    def closure():
        opt.zero_grad()
        evaluations.append(1)
        if len(evaluations) == fail_at:
            raise ArithmeticError
        loss = (p**4 + p**2).sum() * (float("nan") if len(evaluations) == bad_at else 1.0)
        loss.backward()
        return loss

    return opt, closure, evaluations


def test_a_bad_first_evaluation_of_lbfgs_is_a_skip():
    p = parameter(1.0, 2.0)
    opt, closure, evaluations = lbfgs_and_closure(p, bad_at=1)
    info = opt.step(closure)
    assert (info.updated, info.skipped) == (False, True)
    assert (p.tolist(), len(evaluations)) == ([1.0, 2.0], 1)
    assert opt.step(closure).updated


@pytest.mark.parametrize("fail_at", [1, 2, 3])
def test_a_closure_that_fails_inside_lbfgs_is_cleared_by_discard(fail_at):
    p, q = parameter(1.0, 2.0), parameter(1.0, 2.0)
    opt, closure, _ = lbfgs_and_closure(p, fail_at=fail_at)
    unbroken, unbroken_closure, _ = lbfgs_and_closure(q)
    with pytest.raises(ArithmeticError):
        opt.step(closure)
    opt.discard()
    assert (opt.clock.micro_step, opt.clock.update_step) == (0, 0)
    assert opt.step(closure).updated
    unbroken.step(unbroken_closure)
    assert_close(p, q)


@pytest.mark.parametrize("plain_backward", [True, False])
def test_a_closure_is_the_micro_step(plain_backward):
    w = parameter(1.0)
    opt = clocked_sgd(w)
    calls = []

    def closure():
        calls.append(1)
        opt.zero_grad()
        loss = 1 * w
        loss.backward() if plain_backward else opt.backward(loss)
        return loss

    info = opt.step(closure)
    assert (info.updated, info.loss) == (True, 1.0)
    assert_close(w, 0.0)
    assert len(calls) == 1
    assert (opt.clock.micro_step, opt.clock.update_step) == (1, 1)


@each_optimizer
def test_every_optimizer_takes_closures_in_windows(make_optimizer):
    p, q = parameter(1.0, 2.0), parameter(1.0, 2.0)
    opt = ClockedOptimizer(make_optimizer([p]), gradient_accumulation_steps=2, loss_scale=4.0)
    plain = make_optimizer([q])
    for _ in range(2):
        for c in (1.0, 3.0):

            def closure(c=c):
                opt.zero_grad()
                loss = (c * p * p).sum()
                opt.backward(loss)
                return loss

            opt.step(closure)
        plain.zero_grad()
        (2 * q * q).sum().backward()
        plain.step()
    assert_close(p, q, num_roundings=16)
    assert (opt.clock.micro_step, opt.clock.update_step) == (4, 2)


@pytest.mark.parametrize("closures_before", [0, 1])
@pytest.mark.parametrize("plain_backward", [True, False])
def test_a_backward_before_the_closure_is_an_error(closures_before, plain_backward):
    w = parameter(1.0)
    opt = clocked_sgd(w, gradient_accumulation_steps=closures_before + 1)

    def closure():
        opt.backward(3 * w)
        return 3 * w

    for _ in range(closures_before):
        opt.step(closure)
    (5 * w).backward() if plain_backward else opt.backward(5 * w)
    with pytest.raises(RuntimeError, match="closure"):
        opt.step(closure)
    assert w.item() == 1.0


@pytest.mark.parametrize("plain_before", [True, False])
def test_a_plain_backward_before_the_closure_is_an_error_whatever_came_before(plain_before):
    w = parameter(1.0)
    opt = clocked_sgd(w, gradient_accumulation_steps=2)
    w.backward() if plain_before else opt.backward(w)
    opt.step()
    (5 * w).backward()
    with pytest.raises(RuntimeError, match="closure"):
        opt.step(lambda: opt.backward(3 * w))
    assert w.item() == 1.0


def test_a_plain_backward_in_a_closure_is_refused_with_a_loss_scale():
    w = parameter(1.0)
    opt = clocked_sgd(w, loss_scale=4.0)

    def closure():
        loss = 3 * w
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match=r"opt\.backward"):
        opt.step(closure)
    assert w.item() == 1.0
