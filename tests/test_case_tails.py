"""Cases 13 to 15: the short window at the end of an epoch, and the number of updates."""

import pytest
import torch
from helpers import assert_close, clocked_sgd, each_backend, parameter, run_micro_steps

from stepclock_ext import ClockedOptimizer, LossScale


def window_sizes(opt, w, epochs, micro_steps_per_epoch):
    """Micro steps of each window that updated, in order."""
    sizes, before = [], 0
    for _ in range(epochs):
        for _ in range(micro_steps_per_epoch):
            if run_micro_steps(opt, w, [1]).updated:
                sizes.append(opt.clock.micro_step - before)
                before = opt.clock.micro_step
        if opt.end_epoch().updated:
            sizes.append(opt.clock.micro_step - before)
        if opt.tail != "carry":
            before = opt.clock.micro_step
    return sizes


@each_backend
@pytest.mark.parametrize(
    ("tail", "sizes"), [("flush", [4, 3, 4, 3]), ("carry", [4, 4, 4]), ("drop", [4, 4])]
)
def test_a_tail_never_leaks_into_the_next_epoch(tail, sizes, backend):
    w = parameter(0.0)
    opt = clocked_sgd(w, gradient_accumulation_steps=4, tail=tail, backend=backend)
    assert window_sizes(opt, w, epochs=2, micro_steps_per_epoch=7) == sizes
    assert opt.clock.update_step == len(sizes)
    assert_close(w, -1.0 * len(sizes))


@pytest.mark.parametrize("size", [(), (70_001,)])
@pytest.mark.parametrize("loss_scale", [None, 256.0, LossScale(init_scale=256.0)])
def test_a_tail_of_three_micro_steps_is_divided_by_three(size, loss_scale):
    w = torch.nn.Parameter(torch.ones(size))
    opt = clocked_sgd(w, gradient_accumulation_steps=4, loss_scale=loss_scale)
    for c in (3, 3, 3, 3, 1, 2, 6):
        opt.backward(c * w.sum())
        opt.step()
    info = opt.end_epoch()
    assert info.updated
    assert info.grad_norm == pytest.approx(3.0 * w.numel() ** 0.5, rel=1e-6)
    assert_close(w, torch.full(size, 1 - 3.0 - 3.0), num_roundings=3)


@pytest.mark.parametrize("size", [(), (70_001,)])
def test_gradients_of_a_dropped_tail_reach_no_update(size):
    w = torch.nn.Parameter(torch.zeros(size))
    opt = clocked_sgd(w, gradient_accumulation_steps=4, tail="drop")
    run_micro_steps(opt, w, [1] * 4 + [1000] * 3)
    assert not opt.end_epoch().updated
    run_micro_steps(opt, w, [1] * 4)
    assert_close(w.mean() * w.numel(), -2.0, num_roundings=w.numel())


def test_a_carried_window_is_the_mean_over_both_epochs():
    w = parameter(0.0)
    opt = clocked_sgd(w, gradient_accumulation_steps=4, tail="carry")
    run_micro_steps(opt, w, [1, 2, 3])
    info = opt.end_epoch()
    assert (info.updated, info.skipped, info.grad_norm) == (False, False, None)
    assert run_micro_steps(opt, w, [6]).updated
    assert_close(w, -3.0)
    assert (opt.clock.epoch, opt.clock.micro_step_in_epoch) == (1, 1)


def test_an_epoch_that_divides_exactly_has_no_tail():
    w = parameter(0.0)
    opt = clocked_sgd(w, gradient_accumulation_steps=4)
    run_micro_steps(opt, w, [1] * 8)
    info = opt.end_epoch()
    assert (info.updated, info.skipped) == (False, False)
    assert opt.clock.update_step == 2
    assert_close(w, -2.0)


def test_windows_of_one_have_no_tail():
    w = parameter(0.0)
    opt = clocked_sgd(w)
    run_micro_steps(opt, w, [1] * 3)
    assert not opt.end_epoch().updated
    assert opt.clock.update_step == 3


def test_an_epoch_without_a_micro_step_updates_nothing():
    w = parameter(0.0)
    opt = clocked_sgd(w, gradient_accumulation_steps=4)
    info = opt.end_epoch()
    assert (info.updated, info.skipped) == (False, False)
    assert (opt.clock.epoch, opt.clock.update_step) == (1, 0)


def test_flush_closes_a_window_without_ending_the_epoch():
    w = parameter(0.0)
    opt = clocked_sgd(w, gradient_accumulation_steps=4, tail="drop")
    run_micro_steps(opt, w, [1, 3])
    assert opt.flush().updated
    assert_close(w, -2.0)
    assert (opt.clock.epoch, opt.clock.micro_step_in_epoch) == (0, 2)
    assert not opt.flush().updated
    assert opt.clock.update_step == 1


# 14: windows longer than an epoch, and nonsense.


@pytest.mark.parametrize(
    ("tail", "updates", "pending"), [("flush", 4, 0), ("carry", 1, 4), ("drop", 0, 0)]
)
def test_windows_longer_than_an_epoch_follow_the_tail_policy(tail, updates, pending):
    w = parameter(0.0)
    opt = clocked_sgd(w, gradient_accumulation_steps=8, tail=tail)
    sizes = window_sizes(opt, w, epochs=4, micro_steps_per_epoch=3)
    assert len(sizes) == opt.clock.update_step == updates
    assert_close(w, -1.0 * updates)
    assert 12 - sum(sizes) == (12 if tail == "drop" else pending)


def test_four_pending_micro_steps_can_be_flushed_at_the_end_of_training():
    w = parameter(0.0)
    opt = clocked_sgd(w, gradient_accumulation_steps=8, tail="carry")
    run_micro_steps(opt, w, [1] * 8 + [2, 4, 6, 8])
    opt.end_epoch()
    assert opt.flush().updated
    assert_close(w, -1.0 - 5.0)


@pytest.mark.parametrize(
    ("steps", "error"),
    [(0, ValueError), (-1, ValueError), (2.5, TypeError), ("4", TypeError), (None, TypeError)],
)
def test_an_accumulation_that_is_no_positive_integer_is_refused(steps, error):
    w = parameter(1.0)
    inner = torch.optim.SGD([w], lr=1.0)
    with pytest.raises(error, match=r"gradient_accumulation_steps.*got"):
        ClockedOptimizer(inner, gradient_accumulation_steps=steps)
    opt = ClockedOptimizer(inner, gradient_accumulation_steps=3)
    with pytest.raises(error, match=r"gradient_accumulation_steps.*got"):
        opt.gradient_accumulation_steps = steps
    assert opt.gradient_accumulation_steps == 3


def test_a_tail_policy_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"tail.*'pad'"):
        clocked_sgd(parameter(1.0), tail="pad")


# 15: the number of updates.


@pytest.mark.parametrize(
    ("tail", "updates"), [("flush", [1, 2, 2, 3]), ("drop", [0, 1, 2, 2]), ("carry", [0, 1, 2, 2])]
)
def test_epochs_of_1_7_8_9_micro_steps_in_windows_of_four(tail, updates):
    counted = []
    for n in (1, 7, 8, 9):
        w = parameter(0.0)
        opt = clocked_sgd(w, gradient_accumulation_steps=4, tail=tail)
        counted.append(len(window_sizes(opt, w, epochs=1, micro_steps_per_epoch=n)))
    assert counted == updates


PLANNED = {
    "flush": lambda n, k, epochs: epochs * -(-n // k),
    "drop": lambda n, k, epochs: epochs * (n // k),
    "carry": lambda n, k, epochs: epochs * n // k,
}


@pytest.mark.parametrize("tail", PLANNED)
@pytest.mark.parametrize("accumulation", range(1, 10))
def test_the_loop_makes_as_many_updates_as_the_arithmetic_says(tail, accumulation):
    w = parameter(0.0)
    for n in range(1, 41):
        opt = clocked_sgd(w, gradient_accumulation_steps=accumulation, tail=tail)
        for _ in range(2):
            for _ in range(n):
                w.backward()
                opt.step()
            opt.end_epoch()
        assert opt.clock.update_step == PLANNED[tail](n, accumulation, 2), n
        assert opt.clock.micro_step == 2 * n
        w.grad = None
