"""Case 47: code of others that hangs on backward or on the step."""

from types import MethodType

import pytest
import torch
from helpers import (
    assert_close,
    clip_factor,
    clocked_sgd,
    each_backend,
    each_optimizer,
    parameter,
    run_micro_steps,
)
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from stepclock_ext import ClockedOptimizer


@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("size", [(), (70_001,)])
def test_a_hook_that_takes_every_gradient_is_a_loud_error(accumulation, size):
    w = torch.nn.Parameter(torch.ones(size))

    def free(p):
        p.grad = None

    w.register_post_accumulate_grad_hook(free)
    opt = clocked_sgd(w, gradient_accumulation_steps=accumulation)
    with pytest.raises(RuntimeError, match="hook"):
        run_micro_steps(opt, w, [1] * accumulation)
    assert opt.clock.update_step == 0
    assert_close(w, torch.ones(size))


@each_optimizer
@each_backend
def test_step_hooks_fire_once_an_update_and_never_on_a_skip(make_optimizer, backend):
    w = parameter(1.0)
    inner = make_optimizer([w])
    fired = []
    inner.register_step_pre_hook(lambda *_: fired.append("pre"))
    inner.register_step_post_hook(lambda *_: fired.append("post"))
    opt = ClockedOptimizer(inner, gradient_accumulation_steps=3, backend=backend)
    for slopes in ([1, 2, 3], [1, float("inf"), 3], [3, 2, 1]):
        run_micro_steps(opt, w, slopes)
    assert (opt.clock.update_step, opt.clock.skipped_updates) == (2, 1)
    assert fired == ["pre", "post"] * 2


@each_optimizer
def test_hooks_on_all_optimizers_fire_once_an_update(make_optimizer):
    w = parameter(1.0)
    inner = make_optimizer([w])
    opt = ClockedOptimizer(inner, gradient_accumulation_steps=2)
    fired = []
    handles = [
        register_optimizer_step_pre_hook(lambda optimizer, *_: fired.append(optimizer)),
        register_optimizer_step_post_hook(lambda optimizer, *_: fired.append(optimizer)),
    ]
    try:
        run_micro_steps(opt, w, [1] * 4)
    finally:
        for handle in handles:
            handle.remove()
    assert [optimizer for optimizer in fired if optimizer is inner] == [inner] * 4


@each_optimizer
@pytest.mark.parametrize("scheduled", [False, True])
def test_a_step_that_somebody_replaced_is_called_with_the_gradient(make_optimizer, scheduled):
    w = parameter(1.0)
    inner = make_optimizer([w])
    original, seen = type(inner).step, []

    def step(self, closure=None):
        seen.append(w.grad.item())
        return original(self, closure)

    inner.step = MethodType(step, inner)
    schedulers = [StepLR(inner, step_size=1)] if scheduled else []
    opt = ClockedOptimizer(inner, gradient_accumulation_steps=2, schedulers=schedulers)
    run_micro_steps(opt, w, [1, 3, 2, 6])
    assert seen == [2.0, 4.0]
    assert w.item() != 1.0


@each_backend
def test_a_hook_may_change_the_gradient_before_the_update(backend):
    w = parameter(0.0)
    opt = clocked_sgd(w, max_grad_norm=1.0, backend=backend)

    def double(*_):
        w.grad *= 2

    opt.optimizers[0].register_step_pre_hook(double)
    run_micro_steps(opt, w, [5])
    assert_close(w, -10.0 * clip_factor(5.0, 1.0))


@pytest.mark.parametrize("size", [(), (70_001,)])
def test_a_post_accumulate_hook_sees_the_sum_so_far(size):
    w = torch.nn.Parameter(torch.zeros(size))
    seen = []

    def halve(p):
        seen.append(p.grad.mean().item())
        p.grad.mul_(0.5)

    w.register_post_accumulate_grad_hook(halve)
    opt = clocked_sgd(w, gradient_accumulation_steps=3)
    for c in (2, 4, 8):
        opt.backward(c * w.sum())
        opt.step()
    assert seen == [2.0, 5.0, 10.5]
    assert_close(w, torch.full(size, -1.75))


@pytest.mark.parametrize("size", [(), (70_001,)])
def test_a_tensor_hook_sees_each_micro_gradient_once(size):
    w = torch.nn.Parameter(torch.zeros(size))
    seen = []
    w.register_hook(lambda grad: seen.append(grad.sum().item()))
    opt = clocked_sgd(w, gradient_accumulation_steps=3)
    for c in (1, 2, 6):
        opt.backward(c * w.sum())
        opt.step()
    assert seen == [c * w.numel() for c in (1, 2, 6)]
    assert_close(w, torch.full(size, -3.0))


@each_optimizer
def test_a_scheduler_made_before_the_wrapper_warns_about_nothing(make_optimizer):
    w = parameter(1.0)
    inner = make_optimizer([w])
    first = StepLR(inner, step_size=1)
    opt = ClockedOptimizer(inner, schedulers=[first])
    second = StepLR(opt, step_size=1)
    opt.attach(second)
    run_micro_steps(opt, w, [1, 2])
    assert (first.last_epoch, second.last_epoch) == (2, 2)
