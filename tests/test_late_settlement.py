"""An update settled late, as on a device, is the update settled at once, to the bit."""

import math

import pytest
import torch
from helpers import given
from tolerance import assert_all_bit_equal

from stepclock_ext import EMA, ClockedOptimizer, LossScale
from stepclock_ext.backends.native import NativeBackend, status

pytestmark = pytest.mark.skipif(not status().available, reason=status().reason)

MAKERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True, weight_decay=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}
OPTIONS = {
    "plain": {},
    "clipped": {"max_grad_norm": 0.5},
    "static scale": {"loss_scale": 8.0},
    "dynamic scale": {"loss_scale": LossScale(init_scale=64.0, growth_interval=2)},
    "largest magnitude": {"max_grad_norm": 0.5, "norm_type": math.inf},
}
BAD = {3, 4, 9}  # windows whose gradients overflow


class LateBackend(NativeBackend):
    """The CPU kernels as if they ran on while the host goes on."""

    settles_late = True


def start(make, *, late, dtype=torch.float32, steps=2, sizes=(3, 70_001, 1), **options):
    torch.manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(n).to(dtype)) for n in sizes]
    ema = EMA(0.9, warmup=True) if options.pop("averages", False) else None
    opt = ClockedOptimizer(
        make(params), gradient_accumulation_steps=steps, backend="cpu", ema=ema, **options
    )
    opt.attach(torch.optim.lr_scheduler.LambdaLR(opt, lambda u: 1 / (1 + u)))
    if late:
        opt._backend = LateBackend()
        opt._build_pass()
    return params, opt


def run(params, opt, num_windows, *, look=lambda window, info: None):
    generator = torch.Generator().manual_seed(2)
    infos = []
    for window in range(num_windows):
        for micro in range(opt.gradient_accumulation_steps):
            grads = [torch.randn(p.shape, generator=generator).to(p.dtype) for p in params]
            if window in BAD:
                grads[1][5] = math.inf
            opt.backward(given(*zip(params, grads, strict=True)), weight=1 + micro)
            info = opt.step()
        look(window, info)
        infos.append(info)
    return infos


def everything(params, opt):
    """All tensors that an update moves."""
    tensors = [p.detach() for p in params]
    for p in params:
        tensors += [v for v in opt.state[p].values() if isinstance(v, torch.Tensor)]
        tensors.append(opt.master_weight(p))
        if opt._companions.ema is not None:
            tensors.append(opt._companions.ema.average(p))
    return tensors


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("steps", [1, 2])
def test_a_late_run_is_the_run_that_settles_at_once(make, options, steps):
    results = []
    for late in (False, True):
        params, opt = start(make, late=late, steps=steps, averages=True, **options)
        infos = run(params, opt, 12)
        results.append((everything(params, opt), infos, opt.clock.state_dict(), opt.state_dict()))
    (now, infos, clock, state), (later, late_infos, late_clock, late_state) = results
    assert_all_bit_equal(later, now)
    assert list(map(repr, late_infos)) == list(map(repr, infos))  # a NaN is not equal to itself
    assert late_clock == clock
    assert clock["update_step"] == 12 - len(BAD)
    for key in ("loss_scale", "consecutive_skips", "schedulers", "last_lr"):
        assert late_state["stepclock"][key] == state["stepclock"][key]


@pytest.mark.parametrize("option", [{"master_weights": True}, {"rounding": "stochastic"}])
def test_so_is_a_late_run_in_16_bits(option):
    results = []
    for late in (False, True):
        settings = {"dtype": torch.bfloat16, "averages": True, "max_grad_norm": 1.0, **option}
        params, opt = start(MAKERS["adamw"], late=late, **settings)
        infos = run(params, opt, 12)
        results.append((everything(params, opt), infos))
    assert_all_bit_equal(results[1][0], results[0][0])
    assert list(map(repr, results[1][1])) == list(map(repr, results[0][1]))


def test_the_host_asks_nothing_until_somebody_looks_or_a_micro_step_ends():
    params, opt = start(MAKERS["adamw"], late=True)
    seen = []

    def look(window, info):
        seen.append((opt._unsettled is not None, type(info).__name__))

    run(params, opt, 3, look=look)
    assert seen == [(False, "StepInfo"), (True, "LateStepInfo"), (True, "LateStepInfo")]


LOOKS = {
    "the info": lambda opt, info: info.updated,
    "its text": lambda opt, info: repr(info),
    "the clock": lambda opt, info: opt.clock.update_step,
    "a trigger": lambda opt, info: opt.clock.due("eval", every=1),
    "the groups": lambda opt, info: opt.param_groups[0]["lr"],
    "the scale": lambda opt, info: opt.loss_scale,
    "the state": lambda opt, info: opt.state_dict(),
    "an epoch": lambda opt, info: opt.end_epoch(),
    "a discard": lambda opt, info: opt.discard(),
}


@pytest.mark.parametrize("ask", LOOKS.values(), ids=LOOKS)
def test_a_look_settles_and_finds_what_happened(ask):
    params, opt = start(MAKERS["adamw"], late=True, loss_scale=LossScale(init_scale=8.0))
    info = run(params, opt, 4)[-1]
    ask(opt, info)
    assert opt._unsettled is None
    assert (info.updated, info.skipped) == (False, True)
    assert (opt.clock.update_step, opt.clock.skipped_updates) == (3, 1)
    assert opt.loss_scale.scale == 4.0
    assert opt.param_groups[0]["lr"] == pytest.approx(0.1 / 4)


def test_an_info_that_is_read_at_the_end_still_tells_its_own_update():
    params, opt = start(MAKERS["adamw"], late=True)
    infos = run(params, opt, 6)
    assert [info.update_step for info in infos] == [1, 2, 3, 3, 3, 4]
    assert [info.skipped for info in infos] == [False, False, False, True, True, False]
    assert [info.lr[0] for info in infos[:3]] == pytest.approx([0.1, 0.05, 0.1 / 3])


@pytest.mark.parametrize(
    "options",
    [
        {"max_consecutive_skips": 5},
        {"noise_scale": True},
        {"nonfinite": "raise"},
        {"norm_type": 3.0},
        {"dtype": torch.float64},
    ],
    ids=str,
)
def test_what_needs_the_outcome_settles_at_once(options):
    params, opt = start(MAKERS["adamw"], late=True, **options)
    run(params, opt, 2, look=lambda window, info: info)
    assert opt._unsettled is None


def test_step_hooks_and_other_optimizers_settle_at_once():
    params, opt = start(MAKERS["adamw"], late=True)
    opt.optimizers[0].register_step_post_hook(lambda *_: None)
    run(params, opt, 2)
    assert opt._unsettled is None
    params, opt = start(lambda ps: torch.optim.Adagrad(ps, lr=0.1), late=True)
    run(params, opt, 2)
    assert opt._unsettled is None
