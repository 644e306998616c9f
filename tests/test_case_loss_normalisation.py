"""Cases 1 and 4: which number a window's sum is divided by, and that it happens once."""

import pytest
import torch
from helpers import (
    SIZES,
    assert_close,
    clocked_sgd,
    each_backend,
    each_optimizer,
    parameter,
    run_micro_steps,
)
from torch.nn.functional import cross_entropy

from stepclock_ext import ClockedOptimizer, LossScale

SCALES = [None, 1024.0, LossScale(init_scale=8.0)]


@each_backend
@pytest.mark.parametrize("scale", SCALES)
def test_one_token_counts_a_third_of_three_tokens(backend, scale):
    w = parameter(1.0)
    opt = clocked_sgd(w, gradient_accumulation_steps=2, loss_scale=scale, backend=backend)
    info = run_micro_steps(opt, w, [10, 2], weights=[1, 3])
    assert_close(w, 1 - 4.0)
    assert info.loss == 4.0
    assert info.grad_norm == 4.0


@each_backend
@pytest.mark.parametrize("size", SIZES)
def test_five_samples_in_micro_batches_of_two_two_one_are_averaged_as_five(backend, size):
    w = torch.nn.Parameter(torch.ones(size))
    opt = clocked_sgd(w, gradient_accumulation_steps=3, backend=backend)
    for samples in ([1, 2], [3, 4], [5]):
        mean_slope = sum(samples) / len(samples)
        opt.backward(mean_slope * w.sum(), weight=len(samples))
        info = opt.step()
    assert_close(w, torch.full(size, 1 - 3.0), num_roundings=3)
    assert info.grad_norm == pytest.approx(3.0 * w.numel() ** 0.5, rel=1e-6)


def test_weights_may_be_fractions_and_tensors():
    w = parameter(1.0)
    opt = clocked_sgd(w, gradient_accumulation_steps=2)
    info = run_micro_steps(opt, w, [10, 2], weights=[0.125, torch.tensor(0.375)])
    assert_close(w, 1 - 4.0)
    assert info.loss == 4.0
    assert opt.clock.weight_seen == 0.5


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_two_backwards_of_one_micro_step_add_their_weights(size, accumulation):
    w = torch.nn.Parameter(torch.zeros(size))
    opt = clocked_sgd(w, gradient_accumulation_steps=accumulation)
    for micro in range(accumulation):
        opt.backward(10 * w.sum(), weight=1)
        opt.backward((2 + 8 * micro) * w.sum(), weight=3)
        info = opt.step()
    mean = 4.0 if accumulation == 1 else (4.0 + 10.0) / 2
    assert_close(w, torch.full(size, -mean))
    assert_close(info.grad_norm, mean * w.numel() ** 0.5)
    assert (opt.clock.micro_step, opt.clock.weight_seen) == (accumulation, 4 * accumulation)


def test_each_window_is_divided_by_its_own_weight():
    w = parameter(0.0)
    opt = clocked_sgd(w, gradient_accumulation_steps=2)
    run_micro_steps(opt, w, [10, 2], weights=[1, 3])
    run_micro_steps(opt, w, [10, 2], weights=[30, 10])
    assert_close(w, -(4.0 + 8.0))


def test_a_tail_is_divided_by_the_weight_it_holds():
    w = parameter(1.0)
    opt = clocked_sgd(w, gradient_accumulation_steps=8)
    run_micro_steps(opt, w, [10, 2], weights=[1, 3])
    info = opt.end_epoch()
    assert_close(w, 1 - 4.0)
    assert info.loss == 4.0


def test_clipping_sees_the_weighted_mean():
    w = parameter(0.0)
    opt = clocked_sgd(w, gradient_accumulation_steps=2, max_grad_norm=4.5)
    run_micro_steps(opt, w, [10, 2], weights=[1, 3])  # the mean of means, 6, would be clipped
    assert_close(w, -4.0)


def token_batches():
    """Sequences of 1 to 9 tokens as (inputs, targets) in fp64."""
    generator = torch.Generator().manual_seed(0)
    for tokens in (1, 9, 2, 5, 7, 3):
        inputs = torch.randn(tokens, 4, generator=generator, dtype=torch.float64)
        yield inputs, torch.randint(3, (tokens,), generator=generator)


@each_optimizer
@pytest.mark.parametrize("accumulation", [1, 2, 3, 6])
def test_token_weights_make_accumulation_equal_to_one_batch(make_optimizer, accumulation):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3, dtype=torch.float64)
    whole = torch.nn.Linear(4, 3, dtype=torch.float64)
    whole.load_state_dict(model.state_dict())
    opt = ClockedOptimizer(
        make_optimizer(model.parameters()),
        gradient_accumulation_steps=accumulation,
        max_grad_norm=0.1,
    )
    plain = make_optimizer(whole.parameters())
    batches = list(token_batches())
    for first in range(0, len(batches), accumulation):
        window = batches[first : first + accumulation]
        for x, y in window:
            opt.backward(cross_entropy(model(x), y), weight=len(y))
            info = opt.step()
        x, y = (torch.cat(parts) for parts in zip(*window, strict=True))
        loss = cross_entropy(whole(x), y)
        plain.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        plain.step()
        assert info.loss == pytest.approx(loss.item(), rel=1e-12)
        assert info.grad_norm == pytest.approx(norm.item(), rel=1e-12)
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


@each_backend
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("accumulation", range(1, 9))
def test_mean_losses_are_divided_by_the_window_once(backend, scale, accumulation):
    w = parameter(1.0)
    opt = clocked_sgd(
        w, gradient_accumulation_steps=accumulation, loss_scale=scale, backend=backend
    )
    info = run_micro_steps(opt, w, [6] * accumulation)
    assert_close(w, 1 - 6.0)
    assert_close(info.grad_norm, 6.0)
    assert_close(info.loss, 6.0)


@each_backend
@pytest.mark.parametrize("scale", SCALES)
def test_losses_that_the_caller_divided_are_not_divided_again(backend, scale):
    w = parameter(1.0)
    opt = clocked_sgd(
        w, gradient_accumulation_steps=4, reduction="sum", loss_scale=scale, backend=backend
    )
    info = run_micro_steps(opt, w, [1.5] * 4)
    assert_close(w, 1 - 6.0)
    assert info.grad_norm == 6.0


def test_the_tail_of_a_sum_is_left_as_the_caller_scaled_it():
    w = parameter(1.0)
    opt = clocked_sgd(w, gradient_accumulation_steps=4, reduction="sum")
    run_micro_steps(opt, w, [1.5] * 3)
    opt.end_epoch()
    assert_close(w, 1 - 4.5)


@pytest.mark.parametrize("reduction, slope", [("mean", 6.0), ("sum", 1.5)])
def test_plain_backward_is_divided_as_opt_backward_is(reduction, slope):
    w = parameter(1.0)
    opt = clocked_sgd(w, gradient_accumulation_steps=4, reduction=reduction)
    for _ in range(4):
        (slope * w).backward()
        info = opt.step()
    assert_close(w, 1 - 6.0)
    assert info.grad_norm == 6.0


@pytest.mark.parametrize("max_norm", [None, 3.0])
def test_the_norm_of_a_window_is_that_of_the_full_batch(max_norm):
    w = parameter(1.0)
    norms = []
    for accumulation in (1, 4):
        opt = clocked_sgd(w, gradient_accumulation_steps=accumulation, max_grad_norm=max_norm)
        norms.append(run_micro_steps(opt, w, [6] * accumulation).grad_norm)
    assert norms[1] / norms[0] == 1.0


# Token weights and a loss scale: the seed stays in the range that the scale was chosen for.


def test_token_weights_do_not_push_half_precision_gradients_over_its_range():
    w = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
    opt = ClockedOptimizer(
        torch.optim.SGD([w], lr=1.0), gradient_accumulation_steps=2, loss_scale=1024.0
    )
    for tokens, slope in ((4096, 1.0), (1000, 3.0)):
        opt.backward((w * slope).float().mean(), weight=tokens)
        info = opt.step()
    assert info.updated and info.loss_scale == 1024.0
    mean = (4096 * 1.0 + 1000 * 3.0) / 5096
    assert info.grad_norm == pytest.approx(mean / 4 * 2, rel=1e-3)


def test_a_seed_beyond_the_range_of_the_loss_is_a_skip_and_the_scale_backs_off():
    w = torch.nn.Parameter(torch.ones(3))
    opt = ClockedOptimizer(torch.optim.SGD([w], lr=0.1), loss_scale=LossScale(2.0**126))
    opt.backward((w * w).mean())
    opt.step()
    opt.loss_scale = LossScale(2.0**127)
    opt.backward((8 * w * w).sum())
    assert opt.step().skipped
    assert opt.loss_scale.scale == 2.0**126
