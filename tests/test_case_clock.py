"""Cases 5 to 11: what moves the clock, and what only looks as if it did."""

import pytest
import torch
from helpers import (
    assert_close,
    clocked_sgd,
    each_backend,
    each_optimizer,
    parameter,
    run_micro_steps,
)
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from stepclock_ext import ClockedOptimizer, LossScale


def harmonic(optimizer):
    return LambdaLR(optimizer, lambda t: 1 / (1 + t))


# 5: a scheduler walks by updates.


@pytest.mark.parametrize("built_on", ["inner", "wrapper"])
def test_eight_micro_steps_in_windows_of_four_move_a_scheduler_twice(built_on):
    w = parameter(1.0)
    opt = clocked_sgd(w, gradient_accumulation_steps=4)
    scheduler = harmonic(opt if built_on == "wrapper" else opt.optimizers[0])
    opt.attach(scheduler)
    run_micro_steps(opt, w, [1] * 8)
    assert (opt.clock.micro_step, opt.clock.update_step) == (8, 2)
    assert scheduler.last_epoch == 2
    assert opt.param_groups[0]["lr"] == scheduler.get_last_lr()[0] == 1 / 3


@pytest.mark.parametrize("accumulation", [1, 2, 3, 7])
def test_a_tail_moves_a_scheduler_once(accumulation):
    w = parameter(1.0)
    inner = torch.optim.SGD([w], lr=1.0)
    scheduler = harmonic(inner)
    opt = ClockedOptimizer(inner, gradient_accumulation_steps=accumulation, schedulers=[scheduler])
    for _ in range(3):
        run_micro_steps(opt, w, [1] * 7)
        opt.end_epoch()
    assert scheduler.last_epoch == opt.clock.update_step == 3 * -(-7 // accumulation)


SCHEDULERS = {
    "step": lambda o: [StepLR(o, step_size=2, gamma=0.5)],
    "exponential": lambda o: [ExponentialLR(o, gamma=0.9)],
    "cosine": lambda o: [CosineAnnealingLR(o, T_max=6)],
    "one_cycle": lambda o: [OneCycleLR(o, max_lr=1.0, total_steps=9, cycle_momentum=False)],
    "sequential": lambda o: [
        SequentialLR(o, [LinearLR(o, total_iters=3), ExponentialLR(o, gamma=0.9)], milestones=[3])
    ],
    "chained": lambda o: [
        ChainedScheduler([LinearLR(o, total_iters=3), StepLR(o, step_size=2)], optimizer=o)
    ],
    "two": lambda o: [StepLR(o, step_size=2), ExponentialLR(o, gamma=0.9)],
}


@pytest.mark.parametrize("make_schedulers", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_each_update_uses_the_rate_of_a_plain_loop_of_updates(make_schedulers, accumulation):
    plain = torch.optim.SGD([parameter(1.0)], lr=1.0)
    plain_schedulers = make_schedulers(plain)
    expected = []
    for _ in range(8):
        expected.append((plain.param_groups[0]["lr"],))
        plain.step()
        for scheduler in plain_schedulers:
            scheduler.step()

    w = parameter(1.0)
    inner = torch.optim.SGD([w], lr=1.0)
    opt = ClockedOptimizer(
        inner, gradient_accumulation_steps=accumulation, schedulers=make_schedulers(inner)
    )
    rates = [run_micro_steps(opt, w, [1] * accumulation).lr for _ in range(8)]
    assert rates == expected


def test_a_one_cycle_past_its_end_refuses_the_update():
    w = parameter(1.0)
    inner = torch.optim.SGD([w], lr=1.0)
    scheduler = OneCycleLR(inner, max_lr=1.0, total_steps=3, cycle_momentum=False)
    opt = ClockedOptimizer(inner, schedulers=[scheduler])
    run_micro_steps(opt, w, [1] * 3)
    before = w.item()
    with pytest.raises(RuntimeError, match="OneCycleLR"):
        run_micro_steps(opt, w, [1])
    assert (w.item(), opt.clock.update_step) == (before, 3)


# 6: metric schedulers.


@pytest.mark.parametrize("patience, metrics", [(0, [1.0, 2.0]), (1, [1.0, 1.0, 1.0])])
def test_a_plateau_scheduler_cuts_the_rate_once(patience, metrics):
    w = parameter(1.0)
    inner = torch.optim.SGD([w], lr=1.0)
    plateau = ReduceLROnPlateau(inner, factor=0.5, patience=patience)
    opt = ClockedOptimizer(inner, gradient_accumulation_steps=2, schedulers=[plateau])
    for metric in metrics:
        run_micro_steps(opt, w, [1] * 4)
        opt.report_metric(metric)
    assert opt.param_groups[0]["lr"] == 0.5


def test_updates_never_move_a_plateau_scheduler_and_metrics_no_other():
    w = parameter(1.0)
    inner = torch.optim.SGD([w], lr=1.0)
    plateau = ReduceLROnPlateau(inner, factor=0.5, patience=0)
    step = StepLR(inner, step_size=1, gamma=0.9)
    opt = ClockedOptimizer(inner, schedulers=[plateau, step])
    run_micro_steps(opt, w, [1] * 5)
    assert (plateau.last_epoch, step.last_epoch) == (0, 5)
    for metric in (3.0, 2.0, 1.0):
        opt.report_metric(metric)
    assert (plateau.last_epoch, step.last_epoch) == (3, 5)


# 7: a skip is not an update.


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_a_skip_moves_no_scheduler_and_warns_about_nothing(accumulation, bad):
    w = parameter(1.0)
    inner = torch.optim.SGD([w], lr=1.0)
    scheduler = harmonic(inner)
    opt = ClockedOptimizer(
        inner,
        gradient_accumulation_steps=accumulation,
        loss_scale=LossScale(init_scale=65536.0),
        schedulers=[scheduler],
    )
    infos = [run_micro_steps(opt, w, [c] + [1] * (accumulation - 1)) for c in (bad, 1, 1)]
    assert [info.skipped for info in infos] == [True, False, False]
    assert [info.updated for info in infos] == [False, True, True]
    assert (opt.clock.update_step, opt.clock.skipped_updates) == (2, 1)
    assert scheduler.last_epoch == 2
    assert opt.loss_scale.scale == 32768.0


def test_a_skipped_tail_moves_no_scheduler():
    w = parameter(1.0)
    inner = torch.optim.SGD([w], lr=1.0)
    scheduler = harmonic(inner)
    opt = ClockedOptimizer(inner, gradient_accumulation_steps=4, schedulers=[scheduler])
    run_micro_steps(opt, w, [1, float("nan")])
    assert opt.end_epoch().skipped
    assert scheduler.last_epoch == 0
    assert (opt.clock.update_step, opt.clock.skipped_updates, opt.clock.epoch) == (0, 1, 1)


def test_a_multiplicative_schedule_is_not_multiplied_on_a_skip():
    w = parameter(1.0)
    inner = torch.optim.SGD([w], lr=1.0)
    opt = ClockedOptimizer(inner, schedulers=[ExponentialLR(inner, gamma=0.5)])
    run_micro_steps(opt, w, [float("inf")] * 4)
    assert opt.param_groups[0]["lr"] == 1.0


# 9: user code inside a window.


def test_an_evaluation_inside_a_window_moves_no_boundary():
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = ClockedOptimizer(inner, gradient_accumulation_steps=4)
    updated_at = []
    for micro in range(1, 9):
        opt.backward(model(torch.ones(3, 2)).mean())
        if opt.step().updated:
            updated_at.append(micro)
        if micro == 2:
            model.eval()
            with torch.no_grad():
                for _ in range(3):
                    model(torch.ones(3, 2))
            model.train()
    assert updated_at == [4, 8]
    assert opt.clock.micro_step == 8


@each_backend
@pytest.mark.parametrize("size", [(), (70_001,)])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_before_each_micro_step_wipes_nothing(backend, size, set_to_none):
    w = torch.nn.Parameter(torch.ones(size))
    opt = clocked_sgd(w, gradient_accumulation_steps=2, backend=backend)
    for c in (1, 3):
        opt.zero_grad(set_to_none=set_to_none)
        opt.backward(c * w.sum())
        opt.step()
    assert_close(w, torch.full(size, 1 - 2.0))


def test_zero_grad_between_backward_and_step_wipes_nothing():
    w = parameter(1.0)
    opt = clocked_sgd(w)
    opt.backward(2 * w)
    opt.zero_grad()
    assert opt.step().updated
    assert_close(w, 1 - 2.0)


@pytest.mark.parametrize("size", [(), (70_001,)])
@pytest.mark.parametrize("after", [1, 2])
def test_clearing_the_gradients_past_the_clock_is_a_loud_error(size, after):
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(size))])
    w = model[0]
    opt = clocked_sgd(w, gradient_accumulation_steps=3)
    with pytest.raises(RuntimeError, match=r"cleared|replaced"):
        for micro in range(1, 4):
            opt.backward(micro * w.sum())
            opt.step()
            if micro == after:
                model.zero_grad()
    assert_close(w, torch.ones(size))


def test_clearing_one_gradient_of_two_is_a_loud_error():
    w, v = parameter(1.0), parameter(1.0)
    opt = clocked_sgd(w, v, gradient_accumulation_steps=2)
    opt.backward(w + v)
    opt.step()
    v.grad = None
    opt.backward(3 * (w + v))
    with pytest.raises(RuntimeError, match="group 0, parameter 1"):
        opt.step()
    opt.discard()
    run_micro_steps(opt, w, [1, 3])
    assert_close(w, 1 - 2.0)


# 11: the inner optimizer's own counters.


@each_backend
@each_optimizer
def test_three_micro_batches_move_the_inner_state_as_one_batch_does(make_optimizer, backend):
    rows = torch.arange(1.0, 13.0, dtype=torch.float64).outer(
        torch.tensor([1, -1, 0.5], dtype=torch.float64)
    )
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    q = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    plain = make_optimizer([q])
    opt = ClockedOptimizer(make_optimizer([p]), gradient_accumulation_steps=3, backend=backend)
    for _ in range(4):
        for micro in rows.split(4):
            opt.backward((micro @ p).mean())
            opt.step()
        plain.zero_grad()
        (rows @ q).mean().backward()
        plain.step()
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(opt.state[p], plain.state[q], rtol=1e-12, atol=1e-12)


def test_adamw_decays_once_and_counts_one_step_for_three_micro_batches():
    p = parameter(1.0, 1.0, 1.0, dtype=torch.float64)
    inner = torch.optim.AdamW([p], lr=0.1, weight_decay=0.1)
    opt = ClockedOptimizer(inner, gradient_accumulation_steps=3)
    slopes = torch.tensor([1, -1, 0.5], dtype=torch.float64)
    for first in (1, 5, 9):
        mean_row = sum(range(first, first + 4)) / 4 * slopes
        opt.backward(mean_row @ p)
        opt.step()
    gradient = 6.5 * slopes
    expected = 0.99 - 0.1 * gradient / (gradient.abs() + 1e-8)
    torch.testing.assert_close(p.detach(), expected, rtol=1e-12, atol=1e-12)
    assert expected.tolist() == pytest.approx([0.89, 1.09, 0.89], abs=1e-8)
    assert inner.state[p]["step"] == 1
