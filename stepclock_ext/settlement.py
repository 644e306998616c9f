"""The end of a window: measured, decided, updated; and settled at once, or late.

Where a device runs on while the host goes on, and nothing needs the outcome yet, norm, decision and
update stay there: the kernels do nothing where the norm is not finite. The host settles, that is
reads what happened and moves the clock, when somebody asks or the next micro step ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .late_clock import LateReading
from .loss_scale import LossScale
from .noise_scale import NoiseSample
from .norm import Measurement
from .step_info import LateStepInfo, StepInfo
from .window import Window
from .window_gradients import WindowGradients

if TYPE_CHECKING:
    from .optimizer import ClockedOptimizer

__all__ = [
    "Unsettled",
    "settle_epoch",
    "settle_late",
    "settle_skip",
    "settle_update",
    "settle_window",
]


def settle_window(opt: ClockedOptimizer, *, asks: bool = True) -> StepInfo:
    """Ends the open window in an update, in a skip, or in neither.

    Args:
        opt: the wrapper.
        asks: there is a window to end; False only meets others, who may have one.
    """
    if opt._processes is not None:
        if not opt._processes.joint.meet(opt, asks=asks).updates:
            return opt._info()
        opt._schedulers.refuse_ended()  # on every rank alike
    return _settle(opt)


def settle_epoch(opt: ClockedOptimizer) -> StepInfo:
    """Ends the epoch with the other processes: takes part in their windows until all have ended."""
    assert opt._processes is not None
    info = opt._info()
    while True:
        asks = opt.tail == "flush" and opt.clock.micro_step_in_window > 0
        verdict = opt._processes.joint.meet(opt, asks=asks, ended=True)
        if verdict.updates:
            opt._schedulers.refuse_ended()
            info = _settle(opt)
        elif verdict.ended:
            return info


def _settle(opt: ClockedOptimizer) -> StepInfo:
    window = opt._window
    if opt._locals is not None:
        opt._locals.bring_gradients()
    gradients = opt._pass.collect(seeded=window.seeded)
    if gradients.is_empty or window.weight == 0:
        opt.clock.drop_window()
        opt._start_window()
        return opt._info()
    if _may_be_late(opt, gradients):
        late = _update_late(opt, gradients)
        if late is not None:
            return late
    divisor = opt._divisor(window)
    across = None if opt._processes is None else opt._processes.across(opt)
    measurement = opt._pass.measure(gradients, opt._clip, divisor=divisor, across=across)
    if not measurement.finite and opt.nonfinite != "propagate":
        return settle_skip(opt, gradients, measurement)
    sample = _sample_noise(opt, gradients, measurement)
    prepared = opt._pass.prepare(gradients, update=opt.clock.update_step + 1)
    window.start_update()
    opt._pass.update(gradients, measurement, prepared)
    return settle_update(opt, measurement, sample)


def settle_update(
    opt: ClockedOptimizer, measurement: Measurement, sample: NoiseSample | None = None
) -> StepInfo:
    """The parameters have moved: so does all that follows them."""
    lr, window = opt._learning_rates(), opt._window
    opt.clock.tick_update()
    opt._settings.settle(finite=True)
    opt._start_window()
    noise = None if sample is None or opt._noise is None else opt._noise.observe(sample)
    return _follow_update(opt, window, measurement, lr, noise)


def _follow_update(
    opt: ClockedOptimizer,
    window: Window,
    measurement: Measurement,
    lr: tuple[float, ...],
    noise: float | None = None,
    late: Unsettled | None = None,
) -> StepInfo:
    opt._last_lr = lr
    opt._companions.count_update()
    info = opt._info(window, measurement, lr=lr, updated=True, noise_scale=noise)
    if late is not None:
        late.info = info  # also where a scheduler raises
    opt._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers look for it
    opt._schedulers.step()
    return info


def settle_skip(
    opt: ClockedOptimizer, gradients: WindowGradients, measurement: Measurement
) -> StepInfo:
    """Nothing has moved; the loss scale backs off.

    Raises:
        NonFiniteGradientError: with ``nonfinite="raise"``, or at `max_consecutive_skips`.
    """
    update = opt.clock.update_step + 1
    across = None if opt._processes is None else opt._processes.across(opt)
    if opt.nonfinite == "raise":
        raise opt._pass.nonfinite_error("gradients are not finite", gradients, update, across)
    window = opt._window
    opt.clock.tick_skip()
    opt._settings.settle(finite=False)
    info = opt._info(window, measurement, skipped=True)
    error = None
    skips, limit = opt._settings.consecutive_skips, opt.max_consecutive_skips
    if limit is not None and skips >= limit:
        error = opt._pass.nonfinite_error(f"{skips} skips in a row", gradients, update, across)
    opt._start_window()
    if error is not None:
        raise error
    return info


def _sample_noise(
    opt: ClockedOptimizer, gradients: WindowGradients, measurement: Measurement
) -> NoiseSample | None:
    """What the window says about the noise."""
    accumulator, window = opt._pass.accumulator, opt._window
    if accumulator.norms is None or not measurement.finite:
        return None
    sample = accumulator.norms.finish(
        gradients.grads if opt._processes is None else accumulator.grads(),
        accumulator.slots,
        scale=window.divisor("sum"),
        weight=window.weight,
        norm=measurement.norm * opt._divisor(window),
    )
    return sample if opt._processes is None else opt._processes.add_samples(opt, sample)


# Late.


@dataclass(eq=False)
class Unsettled:
    """An update that was launched, of whose outcome the host knows nothing yet.

    Attributes:
        window: what it ended.
        lr: rates it uses.
        stats: on the device.
        reading: of the stats, and of the window's losses.
        info: the outcome, once it is settled.
    """

    window: Window
    lr: tuple[float, ...]
    stats: Tensor
    reading: LateReading
    info: StepInfo | None = None


def _may_be_late(opt: ClockedOptimizer, gradients: WindowGradients) -> bool:
    """Whether nobody needs to know now. A pass's first update makes states, and is not late."""
    rows = opt._pass.rows
    return (
        rows.backend.settles_late
        and opt._processes is None
        and opt._pass.has_updated
        and opt.nonfinite == "skip"
        and opt.max_consecutive_skips is None
        and opt._noise is None
        and opt._settings.next_loss_scale is None
        and opt._clip.norm_type in (2.0, math.inf)
        and not gradients.odd
        and (rows.all_walked or opt._companions.ema is None)
        and all(dtype.itemsize <= 4 for dtype in rows.dtypes)
        and opt._pass.is_bound(gradients)
    )


def _update_late(opt: ClockedOptimizer, gradients: WindowGradients) -> StepInfo | None:
    """Launches measurement and update; None where an inner optimizer has to step by itself."""
    prepared = opt._pass.prepare(gradients, update=opt.clock.update_step + 1, is_gated=True)
    if not opt._pass.is_rule_alone(prepared):
        return None
    window, lr = opt._window, opt._learning_rates()
    divisor = window.divisor(opt.reduction)
    stats = opt._pass.measure_on_device(gradients, opt._clip, divisor=divisor)
    window.start_update()
    opt._pass.update_on_device(prepared, stats)
    losses = window.loss_sum
    has_loss = losses is not None and losses.device == stats.device
    numbers = torch.cat([stats, losses.reshape(1)]) if has_loss else stats  # type: ignore[union-attr]
    late = Unsettled(window, lr, stats, LateReading(numbers))
    opt._unsettled = late
    opt._start_window()

    def read() -> StepInfo:
        settle_late(opt)
        assert late.info is not None
        return late.info

    return LateStepInfo(read)


def settle_late(opt: ClockedOptimizer) -> None:
    """Reads what a late update has become, and moves all that follows it."""
    late, opt._unsettled = opt._unsettled, None
    if late is None:
        return
    norm, coefficient, clip, *losses = late.reading.wait()
    if losses:
        late.window.loss_sum = torch.tensor(losses[0], dtype=torch.float64, device="cpu")
    finite = math.isfinite(norm)
    measurement = Measurement(late.stats, norm, coefficient, norm * clip, finite)
    opt._settings.settle(finite=finite)
    if not opt._window.seeded and isinstance(opt._settings.loss_scale, LossScale):
        opt._window.scale = opt._settings.scale
    if finite:
        opt.clock.tick_update()
        _follow_update(opt, late.window, measurement, late.lr, late=late)
    else:
        opt.clock.tick_skip()
        late.info = opt._info(late.window, measurement, lr=late.lr, skipped=True)
