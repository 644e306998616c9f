"""Whoever looks at a run that settles late finds what one that settles at once would show."""

import copy
import math
import pickle

import pytest
import torch
from helpers import given
from test_late_settlement import MAKERS, LateBackend, run, start

from stepclock_ext import EMA, ClockedOptimizer, LossScale


def both(make=MAKERS["adamw"], **options):
    """The same start, settling at once and late."""
    return [start(make, late=late, **options) for late in (False, True)]


def micro_step(params, opt, value, weight=1.0):
    pairs = [(p, torch.full(p.shape, value)) for p in params if p.requires_grad]
    opt.backward(given(*pairs), weight=weight)
    return opt.step()


def test_a_saved_state_is_that_after_the_last_update():
    saved = []
    for params, opt in both(steps=1):
        run(params, opt, 2)
        saved.append(opt.state_dict())
    now, late = saved
    assert late["param_groups"][0]["lr"] == now["param_groups"][0]["lr"]
    assert late["stepclock"]["schedulers"] == now["stepclock"]["schedulers"]


def test_a_clock_that_is_held_fires_as_one_that_is_asked_for():
    fired = []
    for params, opt in both(steps=1):
        clock = opt.clock
        seen = []
        run(params, opt, 8, look=lambda *_, s=seen, c=clock: s.append(c.due("eval", every=2)))
        fired.append((seen, clock.update_step))
    assert fired[0] == fired[1]
    assert any(fired[0][0])


def test_a_held_clock_is_copied_as_a_plain_one():
    params, opt = start(MAKERS["adamw"], late=True)
    run(params, opt, 3)
    for copied in (copy.deepcopy(opt.clock), pickle.loads(pickle.dumps(opt.clock))):
        assert type(copied).__name__ == "StepClock"
        assert copied.state_dict() == opt.clock.state_dict()


def test_a_scale_that_waits_is_not_charged_with_the_window_before():
    scales = []
    for params, opt in both(loss_scale=LossScale(init_scale=64.0)):
        run(params, opt, 2)
        micro_step(params, opt, math.inf)
        opt.loss_scale = LossScale(init_scale=1024.0)
        micro_step(params, opt, 1.0)
        scales.append((opt.loss_scale.scale, opt.loss_scale.good_steps))
    assert scales[0] == scales[1] == (1024.0, 0)


def test_a_skip_moves_no_average_of_a_parameter_that_no_kernel_walks():
    moved = []
    for late in (False, True):
        torch.manual_seed(0)
        a, b = torch.nn.Parameter(torch.randn(4)), torch.nn.Parameter(torch.randn(8)[::2])
        ema = EMA(0.5)
        opt = ClockedOptimizer(torch.optim.SGD([a, b], lr=0.1), ema=ema, backend="cpu")
        if late:
            opt._backend = LateBackend()
            opt._build_pass()
        for params in ([a, b], [a]):
            micro_step(params, opt, 1.0)
        before = ema.average(b).clone()
        micro_step([a], opt, math.inf)
        assert opt.clock.skipped_updates == 1
        moved.append((ema.average(b) - before).abs().max().item())
    assert moved == [0.0, 0.0]


@pytest.mark.parametrize("make", [MAKERS["adamw"], MAKERS["momentum"]])
def test_a_skip_makes_no_state(make):
    for params, opt in both(make):
        for _ in range(2):
            for _ in range(2):
                micro_step(params[:1], opt, 1.0)
        for value in (1.0, math.inf):
            micro_step(params, opt, value)
        assert opt.clock.skipped_updates == 1
        assert len(opt.optimizers[0].state) == 1


def test_a_scheduler_that_raises_leaves_the_outcome_readable():
    params, opt = start(MAKERS["adamw"], late=True)
    run(params, opt, 2)

    def fail(epoch):
        raise ZeroDivisionError

    opt.attach(torch.optim.lr_scheduler.LambdaLR(opt, lambda u: 1.0))
    opt._schedulers.schedulers[-1].lr_lambdas = [fail]
    for _ in range(2):
        info = micro_step(params, opt, 1.0)
    with pytest.raises(ZeroDivisionError):
        info.updated  # noqa: B018
    assert info.updated
    assert opt.clock.update_step == 3


@pytest.mark.parametrize("tail", ["carry", "drop"])
def test_the_end_of_an_epoch_tells_of_the_last_update(tail):
    ends = []
    for params, opt in both(steps=1, tail=tail):
        run(params, opt, 2)
        info = opt.end_epoch()
        ends.append((info.update_step, info.lr))
    assert ends[0] == ends[1]


def test_an_outcome_that_nobody_has_looked_at_can_be_pickled():
    params, opt = start(MAKERS["adamw"], late=True)
    info = run(params, opt, 2)[-1]
    assert pickle.loads(pickle.dumps(info)) == info
