"""Faults that a second look found: each is a way to lose or to halve something in silence."""

import copy
import weakref

import pytest
import torch
from helpers import each_backend, parameter

from stepclock_ext import ClockedOptimizer, LossScale, NonFiniteGradientError


def sgd(*params, lr=1.0, **settings):
    return torch.optim.SGD(list(params), lr=lr, **settings)


@each_backend
def test_a_pre_hook_may_replace_data_gradient_and_state(backend):
    p = parameter(1.0, 1.0)
    inner = torch.optim.AdamW([p], lr=0.1)
    opt = ClockedOptimizer(inner, backend=backend)
    opt.backward(p.sum())
    opt.step()
    seen = []

    def replace(optimizer, args, kwargs):
        seen.append((len(args), kwargs))
        p.data = p.data.clone()
        p.grad = torch.full((4,), 2.0)[::2]
        state = optimizer.state[p]
        state["exp_avg"] = torch.zeros(2)
        state["step"] = torch.tensor(5.0)

    opt.register_step_pre_hook(replace)
    before = p.detach().clone()
    opt.backward(p.sum())
    assert opt.step().updated
    assert not torch.equal(p.detach(), before)
    assert inner.state[p]["step"].item() == 6.0
    assert inner.state[p]["exp_avg"].tolist() == pytest.approx([0.2, 0.2])
    assert seen == [(1, {})]


def test_an_uncounted_backward_is_not_saved_or_copied_by_halves():
    w = parameter(1.0)
    opt = ClockedOptimizer(sgd(w), gradient_accumulation_steps=2)
    opt.backward(10 * w)
    for copy_it in (opt.state_dict, lambda: copy.deepcopy(opt)):
        with pytest.raises(RuntimeError, match=r"call step\(\) first"):
            copy_it()
    opt.step()
    opt.state_dict()


@pytest.mark.parametrize(
    ("second", "sparse"), [(torch.optim.RMSprop, True), (torch.optim.SparseAdam, False)]
)
def test_no_optimizer_moves_where_another_refuses_its_gradients(second, sparse):
    w = parameter(1.0)
    table = torch.nn.Embedding(4, 2, sparse=sparse)
    opt = ClockedOptimizer([sgd(w), second(table.parameters())])
    opt.backward(w + table(torch.tensor([1, 2])).sum())
    with pytest.raises(TypeError, match=second.__name__):
        opt.step()
    assert w.item() == 1.0
    opt.discard()
    assert opt.clock.micro_step == 0


@pytest.mark.parametrize("end", ["flush", "end_epoch"])
def test_an_uncounted_plain_backward_is_not_swallowed_by_the_end(end):
    w = parameter(1.0)
    opt = ClockedOptimizer(sgd(w), gradient_accumulation_steps=4)
    for _ in range(2):
        (3 * w).backward()
        opt.step()
    (3 * w).backward()
    with pytest.raises(RuntimeError, match=r"call step\(\) first"):
        getattr(opt, end)()
    opt.step()
    assert getattr(opt, end)().grad_norm == pytest.approx(3.0)


def test_a_loss_that_is_not_known_stays_unknown_after_a_closure():
    w = parameter(1.0)
    opt = ClockedOptimizer(sgd(w), gradient_accumulation_steps=2)
    (10 * w).backward()
    opt.step()

    def closure():
        loss = 4 * w
        loss.backward()
        return loss

    info = opt.step(closure)
    assert info.updated and info.loss is None


def test_the_limit_of_skips_raises_at_every_skip_beyond_it():
    w = parameter(1.0)
    opt = ClockedOptimizer(sgd(w), max_consecutive_skips=2)
    outcomes = []
    for _ in range(4):
        opt.backward(w * float("inf"))
        try:
            outcomes.append(opt.step().skipped)
        except NonFiniteGradientError:
            outcomes.append("raised")
    assert outcomes == [True, "raised", "raised", "raised"]
    assert opt.clock.skipped_updates == 4


def test_an_epoch_ends_also_where_its_tail_hits_the_limit_of_skips():
    w = parameter(1.0)
    opt = ClockedOptimizer(sgd(w), gradient_accumulation_steps=2, max_consecutive_skips=1)
    opt.backward(w * float("inf"))
    opt.step()
    with pytest.raises(NonFiniteGradientError):
        opt.end_epoch()
    assert (opt.clock.epoch, opt.clock.micro_step_in_epoch) == (1, 0)


def test_a_window_without_a_scale_reports_none_although_one_was_asked_for():
    w = parameter(1.0)
    opt = ClockedOptimizer(sgd(w), gradient_accumulation_steps=2)
    opt.backward(w)
    opt.step()
    opt.loss_scale = 8.0
    opt.backward(w)
    assert opt.step().loss_scale is None
    opt.backward(w)
    assert opt.step().loss_scale == 8.0


@each_backend
@pytest.mark.parametrize("size", [1, 4, 70_000])
def test_a_negated_view_is_read_with_its_sign(backend, size):
    p = torch.nn.Parameter(torch.ones(size))
    opt = ClockedOptimizer(sgd(p), backend=backend)
    p.grad = torch.complex(torch.zeros(size), torch.ones(size)).conj().imag
    assert p.grad.is_neg()
    opt.step()
    assert torch.equal(p.detach(), torch.full((size,), 2.0))


def test_a_complex_loss_is_refused_and_the_window_goes_on():
    w = parameter(1.0)
    opt = ClockedOptimizer(sgd(w))
    with pytest.raises(TypeError, match="loss must be real"):
        opt.backward(w * (1 + 1j))
    opt.backward(w)
    assert opt.step().updated


def test_a_wrapper_is_not_wrapped_again():
    opt = ClockedOptimizer(sgd(parameter(1.0)))
    with pytest.raises(TypeError, match="no wrapper"):
        ClockedOptimizer(opt)


def test_a_new_group_may_not_take_another_optimizers_parameter():
    a, e = parameter(1.0), parameter(1.0)
    opt = ClockedOptimizer([sgd(a), sgd(e)])
    with pytest.raises(ValueError, match="must belong to one optimizer"):
        opt.add_param_group({"params": [e]})
    assert len(opt.param_groups) == 2


def test_discard_clears_a_group_that_came_inside_the_window():
    w, late = parameter(1.0), parameter(1.0)
    opt = ClockedOptimizer(sgd(w), gradient_accumulation_steps=2)
    opt.backward(w)
    opt.step()
    opt.optimizers[0].add_param_group({"params": [late]})
    (5 * late).backward()
    with pytest.raises(RuntimeError, match="groups changed inside a window"):
        opt.step()
    opt.discard()
    assert late.grad is None
    opt.backward(w + late)
    opt.step()
    opt.backward(w + late)
    assert opt.step().grad_norm == pytest.approx(2**0.5)


def test_gradients_of_many_large_parameters_are_let_go():
    params = [torch.nn.Parameter(torch.ones(65_536)) for _ in range(270)]
    opt = ClockedOptimizer(sgd(*params, momentum=0.9), gradient_accumulation_steps=2)
    for _ in range(3):
        for _ in range(2):
            opt.backward(sum(p.sum() for p in params))
            alive = [weakref.ref(p.grad) for p in params]
            opt.step()
    assert not any(ref() is not None for ref in alive)


def test_a_scale_too_large_for_torchs_hook_is_applied_in_place():
    w = parameter(3.0)
    opt = ClockedOptimizer(
        torch.optim.Adagrad([w], lr=0.1, fused=True), max_grad_norm=1e-3, loss_scale=1e37
    )
    opt.backward(3 * w)
    assert opt.step().updated
    assert w.item() == pytest.approx(2.9)


def test_a_scale_that_backs_off_is_still_reported_as_it_was():
    w = parameter(1.0)
    opt = ClockedOptimizer(sgd(w), loss_scale=LossScale(8.0))
    opt.backward(w * float("inf"))
    info = opt.step()
    assert (info.skipped, info.loss_scale, opt.loss_scale.scale) == (True, 8.0, 4.0)
