"""LBFGS: refused where its closure cannot be right, and the plain loop's equal where it can."""

import copy

import pytest
import torch
from parity import INFO
from tensors import BACKENDS
from tolerance import assert_all_bit_equal, assert_close, assert_near

from stepclock_ext import ClockedOptimizer, LossScale

CONFIGS = {c.desc: c.kwargs for c in INFO["LBFGS"].optim_inputs_func(device="cpu")}
each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_config = pytest.mark.parametrize("kwargs", CONFIGS.values(), ids=CONFIGS)


def curve(params):
    """A loss with one minimum, of every parameter."""
    return sum(((p - 0.3).square() + 0.1 * (p - 0.3).pow(4)).sum() for p in params)


def lbfgs_pair(kwargs):
    shapes = [(), (0,), (3,), (7, 5)]
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    pair = []
    for _ in range(2):
        params = [torch.nn.Parameter(t.clone()) for t in start]
        pair.append((params, torch.optim.LBFGS(params, **copy.deepcopy(kwargs))))
    return pair


@each_config
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 3},
        {"loss_scale": 1024.0},
        {"loss_scale": LossScale()},
    ],
    ids=["windows of three", "static loss scale", "dynamic loss scale"],
)
def test_lbfgs_is_refused_at_construction_where_its_closure_cannot_be_right(kwargs, options):
    (_, inner), _ = lbfgs_pair(kwargs)
    with pytest.raises(ValueError, match="LBFGS"):
        ClockedOptimizer(inner, **options)


def minimise(params, optimizer, max_norm=None):
    """One update by the plain loop."""

    def closure():
        optimizer.zero_grad()
        loss = curve(params)
        loss.backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(params, max_norm)
        return loss

    return optimizer.step(closure)


def minimise_wrapped(params, opt):
    """One update by the wrapper."""

    def closure():
        loss = curve(params)
        loss.backward()
        return loss

    return opt.step(closure)


@each_backend
@each_config
def test_lbfgs_with_a_closure_moves_as_the_plain_loop_to_the_bit(kwargs, backend):
    (params, inner), (others, plain) = lbfgs_pair(kwargs)
    opt = ClockedOptimizer(inner, backend=backend)
    for update in range(3):
        info, loss = minimise_wrapped(params, opt), minimise(others, plain)
        assert info.updated
        assert info.loss == loss.item()
        assert opt.clock.update_step == opt.clock.micro_step == update + 1
        assert_all_bit_equal(params, others)


@each_backend
@each_config
def test_lbfgs_sees_clipped_gradients_in_every_evaluation(kwargs, backend):
    # One iteration: with gradients that stay clipped, differences of two divide by next to nothing.
    (params, inner), (others, plain) = lbfgs_pair({**kwargs, "max_iter": 1})
    opt = ClockedOptimizer(inner, max_grad_norm=0.5, backend=backend)
    info, loss = minimise_wrapped(params, opt), minimise(others, plain, 0.5)
    assert info.grad_norm > 0.5 > info.clipped_norm
    assert_near(info.loss, loss.item(), num_roundings=100)
    for p, q in zip(params, others, strict=True):
        assert_close(p.detach(), q.detach(), num_roundings=1000)


@each_backend
@each_config
def test_the_state_of_lbfgs_goes_from_wrapper_to_bare_and_back(kwargs, backend):
    (params, inner), (others, plain) = lbfgs_pair(kwargs)
    opt = ClockedOptimizer(inner, backend=backend)
    minimise_wrapped(params, opt)
    minimise(others, plain)
    plain.load_state_dict(copy.deepcopy(opt.state_dict()))
    minimise(others, plain)
    opt.load_state_dict(copy.deepcopy(plain.state_dict()))
    for p, q in zip(params, others, strict=True):
        p.data.copy_(q)
    minimise_wrapped(params, opt)
    minimise(others, plain)
    assert_all_bit_equal(params, others)


def test_a_closure_that_returns_no_loss_is_named_whichever_backward_it_calls():
    w = torch.nn.Parameter(torch.ones(2))
    opt = ClockedOptimizer(torch.optim.LBFGS([w]))
    for backward in (opt.backward, lambda loss: loss.backward()):
        with pytest.raises(TypeError, match="the closure must return the loss, got None"):
            opt.step(lambda call=backward: call((w * w).sum()))
        opt.discard()
