"""ClockedOptimizer: the order of events around an update, nothing else."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from . import arguments, closure_step, first_agreement, ops, plan_binding, wrapper_state
from .clock import StepClock
from .companions import ParameterCompanions, new_rounding_seed
from .distributed import Processes, join_processes
from .eager import run_eagerly
from .ema import EMA
from .facade import OptimizerFacade
from .late_clock import watch_clock
from .local_optimizers import LocalOptimizers, has_dtensors
from .loss_scale import LossScale
from .master_weights import MasterWeights
from .noise_scale import NoiseScale
from .norm import Measurement
from .parameters import parameter_names
from .plan import TrainPlan
from .precision import check_pairs, check_precision, is_many_processes
from .reductions import Engine
from .remapped_curve import RemappedCurve
from .schedulers import AttachedSchedulers
from .settlement import Unsettled, settle_epoch, settle_late, settle_window
from .step_info import StepInfo
from .update_pass import ClipSettings, PassSettings, UpdatePass
from .window import Window
from .window_settings import WindowSettings

__all__ = ["ClockedOptimizer"]


class ClockedOptimizer(OptimizerFacade):
    """Wraps an optimizer so that everything that follows training walks by updates.

    Micro steps add gradients; the last one of a window updates::

        backward(loss, weight):  seed S * weight -> autograd -> accumulator (the last one of a
                                 window also writes the chunk sums)
        step():                  count a micro step; inside a window, return
                                 norm, finite?, coefficient = clip / (S * total weight)
                                 finite:  fused update -> clock, schedulers, loss scale, triggers
                                 else:    skip; parameters, state and schedules stay bit-equal

    Args:
        optimizer: a torch optimizer, or a sequence of them under one window, norm, scale and clock.
        gradient_accumulation_steps: micro steps in a window.
        max_grad_norm: limit of the global norm over all groups; None turns clipping off. The norm
            is measured and gradients are checked for NaN and infinity in any case.
        norm_type: 2, infinity, or another positive p.
        reduction: "mean" divides a window's sum by its total weight; "sum" leaves it (the caller
            has scaled the loss).
        loss_scale: None, a float (static) or a `LossScale` (dynamic).
        schedulers: torch schedulers built on `optimizer` or on this wrapper; one step per update.
        model: gives parameters their names in messages; under DDP or FSDP2 the wrapped model, whose
            reduction is then off inside a window and on for its last micro step.
        plan: gives the window length and the tail policy where those are left at their defaults,
            and the schedule where `schedulers` is empty; a scheduler that declares another horizon
            is refused.
        accumulate_dtype: of the sums of 16-bit gradients; None is fp32 in windows of several micro
            steps, else the gradients' own. fp32 sums do not lie in ``.grad``: see `accumulated`.
        master_weights: keep exact fp32 values beside 16-bit parameters, 2 bytes more for bf16 and
            4 for fp16 (AdamW, Adam and SGD).
        rounding: "nearest" or "stochastic", of 16-bit parameters without masters (AdamW, Adam and
            SGD); repeatable from ``torch.manual_seed``.
        ema: an `EMA`, moved in the update pass.
        noise_scale: report the gradient noise scale of each window; gradients then do not lie in
            ``.grad`` inside a window.
        nonfinite: "skip" leaves everything as it was, "raise" raises, "propagate" updates anyway.
        max_consecutive_skips: raise at this many skips in a row; None never does.
        tail: what `end_epoch` does with a short window: "flush" updates, "carry" keeps it open for
            the next epoch, "drop" forgets its gradients.
        backend: "auto", or a name from `stepclock_ext.backends()`.
        process_group: the processes that train together, or `ReducerOptions`: each window's sums
            are then added over them by us, in fp32 where gradients have 16 bits.

    Raises:
        TypeError, ValueError: an argument is outside its range; the message names it.
        RuntimeError: `backend` cannot be used here.

    Example:
        >>> w = torch.nn.Parameter(torch.tensor(1.0))
        >>> opt = ClockedOptimizer(torch.optim.SGD([w], lr=1.0), gradient_accumulation_steps=2)
        >>> opt.backward(10 * w, weight=1)  # one token
        >>> opt.step().updated
        False
        >>> opt.backward(2 * w, weight=3)  # three tokens
        >>> info = opt.step()
        >>> info.updated, info.loss, w.item()
        (True, 4.0, -3.0)
    """

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        gradient_accumulation_steps: int = 1,
        max_grad_norm: float | None = None,
        norm_type: float = 2.0,
        reduction: str = "mean",
        loss_scale: LossScale | float | None = None,
        schedulers: Iterable[LRScheduler] = (),
        model: torch.nn.Module | None = None,
        plan: TrainPlan | None = None,
        accumulate_dtype: torch.dtype | None = None,
        master_weights: bool = False,
        rounding: str = "nearest",
        ema: EMA | None = None,
        noise_scale: bool = False,
        nonfinite: str = "skip",
        max_consecutive_skips: int | None = None,
        tail: str = "flush",
        backend: str = "auto",
        process_group: Any = None,
    ) -> None:
        self.optimizers = arguments.list_optimizers(optimizer)
        steps = arguments.check_count("gradient_accumulation_steps", gradient_accumulation_steps)
        arguments.check_policies(
            reduction=reduction, nonfinite=nonfinite, tail=tail, rounding=rounding
        )
        self.reduction, self.nonfinite = reduction, nonfinite
        steps, self.tail = plan_binding.follow_plan(plan, steps, tail)
        self._clip = ClipSettings(
            arguments.check_max_norm(max_grad_norm), arguments.check_norm_type(norm_type)
        )
        if max_consecutive_skips is not None:
            arguments.check_count("max_consecutive_skips", max_consecutive_skips)
        self.max_consecutive_skips = max_consecutive_skips
        scale = arguments.check_loss_scale(loss_scale, self.nonfinite)
        self._needs_closure = arguments.check_closure_optimizer(self.optimizers, steps, scale)
        self._processes = join_processes(model, process_group, self.optimizers)
        self._precision = check_precision(
            self.optimizers,
            accumulate_dtype=accumulate_dtype,
            master_weights=master_weights,
            rounding=rounding,
            needs_closure=self._needs_closure,
            reduced_by=None if self._processes is None else self._processes.reduced_by,
        )
        arguments.check_noise_scale(noise_scale, norm_type=self._clip.norm_type)
        self._noise = NoiseScale() if noise_scale else None
        self._settings = WindowSettings(steps, scale)
        self._model = model
        self.plan = self._own_plan = plan
        self._curve: RemappedCurve | None = None
        self._last_lr: tuple[float, ...] = ()
        self._unsettled: Unsettled | None = None
        self._clock = StepClock(updates_per_epoch=plan_binding.window_updates_per_epoch(plan))
        self._window = Window(scale=self._settings.scale, is_scaled=scale is not None)
        self._backend_name = backend
        self._backend = ops.make_backend(backend, arguments.first_device(self.optimizers))
        self._companions = ParameterCompanions(
            masters=MasterWeights() if master_weights else None,
            ema=arguments.check_ema(ema),
            rounding_seed=new_rounding_seed() if self._precision.stochastic else None,
        )
        self._buffers: dict[Tensor, Tensor] = {}
        self._schedulers = AttachedSchedulers()
        self._build_pass()
        self._attach_first(list(schedulers))
        if self._processes is not None:
            self._agree(self._processes)
        if ema is not None:
            ema.is_bound = True

    @property
    def clock(self) -> StepClock:
        """The counters and triggers; where an update is not settled yet, this waits for it."""
        self._settle_late()
        return self._clock

    def _settle_late(self) -> None:
        if self._unsettled is not None:
            settle_late(self)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro steps in a window, as in force. A new value takes effect at the next window."""
        return self._settings.steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        steps = arguments.check_count("gradient_accumulation_steps", value)
        if self.plan is not None and steps != self.plan.gradient_accumulation_steps:
            raise ValueError(
                "ClockedOptimizer: gradient_accumulation_steps must be the plan's "
                f"{self.plan.gradient_accumulation_steps}, got {steps}; its horizon is counted in "
                "windows of that length"
            )
        arguments.check_closure_optimizer(self.optimizers, steps, self.loss_scale)
        self._settings.next_steps = steps
        self._adopt_settings()

    @property
    def loss_scale(self) -> LossScale | float | None:
        """The current scale. A new value takes effect at the next window."""
        self._settle_late()
        return self._settings.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: LossScale | float | None) -> None:
        scale = arguments.check_loss_scale(value, self.nonfinite)
        arguments.check_closure_optimizer(self.optimizers, self._settings.steps, scale)
        self._settle_late()
        self._settings.next_loss_scale = (scale,)
        self._adopt_settings()

    # A micro step.

    @run_eagerly
    def backward(self, loss: Tensor, *, weight: float | Tensor = 1.0) -> None:
        """Adds the gradient of ``weight * loss`` to the window.

        Args:
            loss: scalar, the mean over `weight` items.
            weight: what the micro batch counts in the window's mean: 1, or its tokens or samples.
                With 0 the backward is not run and nothing is added. Called several times in one
                micro step, weights add up as losses do.

        Raises:
            TypeError, ValueError: `loss` or `weight` cannot be used; nothing has changed.
            RuntimeError: an earlier backward of this window failed; call `discard()`.
        """
        self._refuse_broken("backward")
        amount = arguments.check_weight(weight)
        needs_backward = self._engine is not None and self._engine.reduces_now
        arguments.check_loss(loss, needs_grad=amount > 0 or needs_backward)
        self._refresh_rows()
        window = self._window
        window.is_pending = True
        if amount == 0:
            if self._engine is not None and needs_backward:
                self._engine.backward_nothing(loss)
            self._pass.accumulator.begin_backward()  # nothing comes, and goes out in its turn
            self._pass.accumulator.end_backward()
            return
        if not window.seeded and window.is_scaled:
            if isinstance(self._settings.loss_scale, LossScale):
                self._settle_late()  # the scale of this window follows from the last one
            if self._processes is None:
                window.set_unit(amount)
            else:
                window.unit = self._processes.joint.next_unit
        self._pass.accumulator.begin_backward()
        try:
            with self._riding():
                torch.autograd.backward(loss, window.seed(loss, amount))
            self._pass.accumulator.end_backward()
        except BaseException as error:
            window.broken = "backward raised"
            if self._processes is not None:
                self._processes.explain(error, self)
            raise
        window.seeded = True
        window.add_weight(amount)
        window.add_loss(loss, amount)

    @run_eagerly
    def step(self, closure: Callable[[], Any] | None = None) -> StepInfo:  # type: ignore[override]
        """Ends a micro step; at the end of a window, updates.

        Args:
            closure: runs once, as this micro step's forward and backward (LBFGS: as often as it
                needs). It may call ``opt.backward`` or plain ``loss.backward()``.

        Returns:
            What happened.

        Raises:
            RuntimeError: plain ``loss.backward()`` was used with a loss scale; a gradient
                disappeared; a backward of this window failed; a one-cycle schedule is at its end.
            NonFiniteGradientError: with ``nonfinite="raise"``, or at `max_consecutive_skips`.
        """
        self._refuse_broken("step")
        self._settle_late()
        self._refresh_rows()
        if self._needs_closure:
            return self._guarded(lambda: closure_step.step_by_closure(self, closure))
        if closure is not None:
            closure_step.run_closure(self, closure)
        window = self._window
        if not window.is_pending:
            self._count_plain_backward()
        accumulator = self._pass.accumulator
        if self.clock.micro_step_in_window + 1 < self._settings.steps:
            self._end_micro_step()
            accumulator.hold()
            self.clock.tick_micro(window.end_micro_step())
            self._expect_micro_step()
            return self._info()
        if self._processes is None:
            self._schedulers.refuse_ended()
        self._end_micro_step()
        self.clock.tick_micro(window.end_micro_step())
        return self._guarded(lambda: settle_window(self))

    @run_eagerly
    def flush(self) -> StepInfo:
        """Updates with what an open window holds; without one, does nothing."""
        self._refuse_pending("flush")
        is_open = self.clock.micro_step_in_window > 0
        if not is_open and self._processes is None:
            return self._info()
        self._refresh_rows()
        if self._processes is None:
            self._schedulers.refuse_ended()
        return self._guarded(lambda: settle_window(self, asks=is_open))

    @run_eagerly
    def end_epoch(self) -> StepInfo:
        """Ends an epoch: the tail is flushed, carried or dropped, and the position starts again."""
        self._refuse_pending("end_epoch")
        info = self._info()
        if self.tail == "drop":
            self.clock.drop_window()
            self._start_window()
        try:
            if self._processes is not None:
                info = self._guarded(lambda: settle_epoch(self))
            elif self.tail == "flush":
                info = self.flush()
        finally:  # also where a settled skip has raised at its limit
            if self.tail == "carry" or not self.clock.micro_step_in_window:
                self.clock.end_epoch()
        return info

    def discard(self) -> range:
        """Drops the open window: its gradients, micro steps, position and weight.

        Returns:
            The micro steps to replay, counted from 1 as the clock does; empty without a window.

        Raises:
            RuntimeError: other ranks have a part of the window's gradients.
        """
        reduction = self._pass.accumulator.reduction
        if reduction is not None and reduction.is_open:
            raise RuntimeError(
                "ClockedOptimizer.discard: other ranks must not have gradients of this window, got "
                "a backward that failed in its last micro step; restart from the last checkpoint"
            )
        last = self.clock.micro_step
        self.clock.rewind_window()
        for group in self.param_groups:  # also of a group that is not known yet
            for p in group["params"]:
                p.grad = None
        self._start_window()
        return range(self.clock.micro_step + 1, last + 1)

    def accumulated(self, p: Tensor) -> Tensor | None:
        """The sum of a parameter's gradients in the open window, wherever it lies.

        Args:
            p: a parameter of this optimizer.

        Returns:
            The accumulator itself: fp32 where 16-bit gradients are summed in fp32, else the
            gradient's dtype. It is the sum of ``loss scale * weight * gradient``, with weights in
            units of a power of two where there is a loss scale. None where no gradient has come.

        Raises:
            ValueError: `p` is no parameter of this optimizer.
        """
        return self._pass.accumulator.accumulated(p)

    def master_weight(self, p: Tensor) -> Tensor:
        """A copy of a parameter, in fp32 where it has 16 bits: exact where masters are kept.

        With sharded states it is gathered: call it on every rank.
        """
        self._refuse_swapped("master_weight")
        return self._pass.master_value(p)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients outside a window; inside one it does nothing (see `discard`)."""
        if self.clock.micro_step_in_window or self._window.is_pending or self._window.broken:
            return
        for inner in self.optimizers:
            inner.zero_grad(set_to_none=set_to_none)
        if self._locals is not None:
            self._locals.bring_gradients()
        self._pass.accumulator.forget_caught()

    # What follows the clock.

    def attach(self, scheduler: LRScheduler) -> None:
        """Moves `scheduler` with every update from now on (a metric scheduler: see below).

        Raises:
            TypeError, ValueError: it is no torch scheduler of this optimizer, or it was built for
                another number of updates than the plan's.
        """
        self._settle_late()
        self._schedulers.attach(scheduler, owners=[self, *self.optimizers], plan=self.plan)

    def _attach_first(self, given: list[LRScheduler]) -> None:
        """The schedulers of the constructor; without any, the plan's own."""
        if self.plan is not None and not given:
            given = [self.plan.make_scheduler(self)]
        for scheduler in given:
            self.attach(scheduler)

    def report_metric(self, value: float) -> None:
        """Moves attached metric schedulers such as ``ReduceLROnPlateau``."""
        self._settle_late()
        self._schedulers.report_metric(value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the first inner optimizer, between two windows.

        Raises:
            RuntimeError: a window is open, or an attached scheduler cannot take another group.
        """
        if self.clock.micro_step_in_window or self._window.is_pending:
            raise RuntimeError(
                "ClockedOptimizer.add_param_group: a window is open, with "
                f"{self.clock.micro_step_in_window} micro steps in it; add it after an update"
            )
        if not isinstance(param_group["params"], Tensor):
            param_group["params"] = list(param_group["params"])
        self._refuse_other_groups()
        inner = self.optimizers[0]
        self._schedulers.refuse_group(inner, self.optimizers[1:])
        arguments.check_new_group(param_group, self.optimizers[1:])
        check_pairs(param_group["params"], self._precision.accumulate_dtype)
        inner.add_param_group(param_group)
        self._schedulers.extend_to_group(inner.param_groups[-1])
        self._refresh_rows()
        if self._processes is not None:
            self._agree(self._processes)

    # Saving, loading, copying.

    def state_dict(self) -> dict[str, Any]:
        """``state`` and ``param_groups`` as the inner optimizer writes them, and ``stepclock``.

        The bare optimizer loads it as it is. Only tensors and plain Python values.
        """
        self._refuse_uncounted("state_dict", is_uncounted=self._window.is_pending)
        return wrapper_state.save(self)

    def load_state_dict(
        self,
        state: dict[str, Any],
        *,
        remap: str | None = None,
        lr_scaling: str | None = None,
        scheduler_factory: Callable[[Optimizer], LRScheduler] | None = None,
    ) -> None:
        """Takes over what `state_dict` gave, of this wrapper or of the bare optimizer.

        The saved plan must be the plan now; without plans, window length, tail, reduction and clip
        must be the saved ones.

        Args:
            state: as `state_dict` gave it.
            remap: how to go on under another plan: "by_samples", "by_progress", "keep_lr" or "hold"
                (see `remap.remap`), or "as_is": saved counters and schedulers, at your own risk.
            lr_scaling: "linear" or "sqrt" multiplies the rest of the curve by that rule of the
                effective batch.
            scheduler_factory: makes a scheduler of your own for the new horizon, from this wrapper
                (``lambda opt: CosineAnnealingLR(opt, T_max=opt.plan.total_updates)``); it is then
                moved through the updates done.

        Raises:
            ScheduleMismatchError: the plans differ and `remap` is None; carries the report.
            TypeError, ValueError: the state is not of these optimizers and schedulers, or the remap
                cannot be done. Nothing has changed in any of these cases.
        """
        self._refuse_swapped("load_state_dict")
        said = wrapper_state.load(
            self,
            state,
            remap=remap,
            lr_scaling=lr_scaling,
            scheduler_factory=scheduler_factory,
        )
        for what in said:
            warnings.warn(f"ClockedOptimizer.load_state_dict: {what}", stacklevel=2)

    def __getstate__(self) -> dict[str, Any]:
        self._refuse_uncounted("__getstate__", is_uncounted=self._window.is_pending)
        return wrapper_state.pack(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        wrapper_state.unpack(self, state)

    def __repr__(self) -> str:
        inner = ", ".join(type(inner).__name__ for inner in self.optimizers)
        return (
            f"ClockedOptimizer({inner}, gradient_accumulation_steps={self._settings.steps}, "
            f"max_grad_norm={self._clip.max_grad_norm}, {self.clock!r})"
        )

    # The end of a window.

    def _guarded(self, settle: Callable[[], StepInfo]) -> StepInfo:
        """Runs the end of a window; where it raises before the window is settled, marks it."""
        try:
            return settle()
        except BaseException as error:
            if self.clock.micro_step_in_window:
                moved = "; parameters may have moved" if self._window.is_updating else ""
                self._window.broken = f"its end raised {type(error).__name__}{moved}"
            raise

    def _start_window(self) -> None:
        """No gradient, no weight, and settings that waited for this moment."""
        self._pass.accumulator.clear()
        if self._locals is not None:
            self._locals.clear_gradients()
        if self._engine is not None:
            self._engine.clear()
        self._window = Window()
        self._adopt_settings()

    @property
    def _num_open(self) -> int:
        """Micro steps in the open window; an update that is not settled has ended its own."""
        return 0 if self._unsettled is not None else self._clock.micro_step_in_window

    def _adopt_settings(self) -> None:
        if self._num_open or self._window.is_pending:
            return
        self._settings.adopt()
        self._window.scale = self._settings.scale
        self._window.is_scaled = self._settings.loss_scale is not None
        if self._pass.rows.is_wide != self._is_wide():
            self._build_pass()
        self._expect_micro_step()

    def _expect_micro_step(self) -> None:
        """Tells the accumulator whether the next micro step is known to be the window's last."""
        is_last = self._num_open + 1 == self._settings.steps
        wants_squares = self._clip.norm_type == 2.0
        self._pass.accumulator.begin_micro_step(is_last=is_last, wants_squares=wants_squares)
        if self._engine is not None:
            self._engine.expect(is_last=is_last)

    @property
    def _engine(self) -> Engine | None:
        """DDP or FSDP2, which reduces gradients inside backward."""
        return None if self._processes is None else self._processes.engine

    def _end_micro_step(self) -> None:
        """The gradients of a micro step are in."""
        if self._engine is not None:
            self._engine.end_micro_step()
        is_inner = self._num_open + 1 < self._settings.steps
        if self._locals is not None and is_inner:  # of the last one when the ranks have met
            self._locals.bring_gradients()
        self._pass.accumulator.end_micro_step(self._window.micro_weight)

    def _info(
        self,
        window: Window | None = None,
        measurement: Measurement | None = None,
        *,
        lr: tuple[float, ...] | None = None,
        updated: bool = False,
        skipped: bool = False,
        noise_scale: float | None = None,
    ) -> StepInfo:
        """The outcome; without a window and a measurement, of a step that ended none."""
        seeded = window or self._window
        return StepInfo(
            updated=updated,
            skipped=skipped,
            loss=None if window is None else window.loss(self.reduction),
            grad_norm=None if measurement is None else measurement.norm,
            clipped_norm=None if measurement is None else measurement.clipped_norm,
            lr=self._learning_rates() if lr is None else lr,
            loss_scale=seeded.scale if seeded.is_scaled else None,
            micro_step=self._clock.micro_step,
            update_step=self._clock.update_step,
            noise_scale=noise_scale,
        )

    # Parts.

    def _build_pass(self) -> None:
        before: UpdatePass | None = vars(self).get("_pass")
        pending = {} if before is None else before.accumulator.take()
        is_local = has_dtensors(self.optimizers)
        self._locals = LocalOptimizers(self.optimizers) if is_local else None
        settings = PassSettings(
            precision=self._precision,
            is_wide=self._is_wide(),
            with_norms=self._noise is not None and self._can_have_norms(),
            names=parameter_names(self._groups, self._model),
            local=self._locals,
            make_reduction=None if self._processes is None else self._processes.make_reduction,
        )
        optimizers = self.optimizers if self._locals is None else self._locals.optimizers
        self._pass = UpdatePass(
            optimizers, self._backend, settings, self._companions, self._buffers
        )
        if self._processes is not None:
            self._processes.watch(self._pass.accumulator, self._groups, self._pass.names)
        self._pass.accumulator.put(pending)
        if self._backend.settles_late:
            watch_clock(self)
        self._expect_micro_step()

    def _can_have_norms(self) -> bool:
        """Whether gradients can be caught one by one: by nobody else's reduction, or LBFGS's."""
        is_ours = self._processes is not None and self._processes.reduced_by == "us"
        return not self._needs_closure and (is_ours or not is_many_processes())

    def _is_wide(self) -> bool:
        reduced_by = None if self._processes is None else self._processes.reduced_by
        is_wide = self._precision.is_wide(self._settings.steps, reduced_by=reduced_by)
        return is_wide and not self._needs_closure

    def _divisor(self, window: Window) -> float:
        """What the window's sum is divided by before the clip."""
        factor = 1.0 if self._processes is None else self._processes.joint.factor(self.reduction)
        return window.divisor(self.reduction) * factor

    def _refresh_rows(self) -> None:
        """Follows groups that were added or changed behind our back, between two windows."""
        if self._is_current():
            return
        if self._num_open or self._window.is_pending:
            raise RuntimeError(
                "ClockedOptimizer: the parameter groups changed inside a window; change them after "
                "an update, or call discard() first"
            )
        self._refuse_other_groups()
        self._build_pass()

    def _refuse_other_groups(self) -> None:
        if self._pass.shards is not None:
            raise RuntimeError(
                "ClockedOptimizer: with shard_states=True the parameter groups must stay as they "
                "are, got others; build another wrapper, and load this one's state_dict()"
            )

    def _agree(self, processes: Processes) -> None:
        """Sees to it that every rank has such a wrapper, with these parameters."""
        first_agreement.check_options(processes.ranks, wrapper_state.options(self))
        first_agreement.check_plan(processes, self._own_plan)
        first_agreement.share_seed(processes, self._companions)
        params, names = self._pass.rows.params, self._pass.names
        first_agreement.agree_on_parameters(processes, params, names)

    def _is_current(self) -> bool:
        if self._locals is None:
            return self._pass.rows.is_current(self._groups)
        return self._locals.is_current(self._groups) and not self._pass.rows.is_stale

    def _riding(self) -> Any:
        """The norm rides on the last micro step of a window, where that one is known."""
        steps = self._settings.steps
        is_last = self._num_open + 1 == steps
        rides = is_last and steps > 1 and self._clip.norm_type == 2.0
        return self._pass.accumulator.ride.riding() if rides else nullcontext()

    def _count_plain_backward(self) -> None:
        """A micro step of weight 1 by ``loss.backward()``, which knows no loss scale."""
        has_scale = self.loss_scale is not None
        if has_scale and not self._pass.accumulator.is_empty():
            raise RuntimeError(
                "ClockedOptimizer.step: with a loss scale every micro step must call "
                "opt.backward(loss), which seeds it, and this one did not (plain "
                "loss.backward()?); for one without items pass weight=0"
            )
        if not self._pass.accumulator.caught.is_watching():
            raise RuntimeError(
                "ClockedOptimizer.step: where wrappers share a parameter every micro step must "
                "call opt.backward(loss), got a plain one after another wrapper took our hooks "
                "off; call opt.backward, or discard() first"
            )
        self._window.add_weight(1.0)
        self._window.loss_known = False

    def _learning_rates(self) -> tuple[float, ...]:
        return tuple(float(group["lr"]) for group in self._groups)

    def _refuse_broken(self, method: str) -> None:
        self._refuse_swapped(method)
        if self._window.broken:
            raise RuntimeError(
                f"ClockedOptimizer.{method}: this window cannot go on ({self._window.broken}); "
                "call discard() and repeat its micro steps"
            )

    def _refuse_swapped(self, method: str) -> None:
        ema = self._companions.ema
        if ema is not None and ema.is_swapped:
            raise RuntimeError(
                f"ClockedOptimizer.{method}: the averaged weights are swapped in; leave ema.swap() "
                "first"
            )

    def _refuse_uncounted(self, method: str, *, is_uncounted: bool) -> None:
        """Between backward and step, what happened is half of a micro step."""
        self._refuse_swapped(method)
        if is_uncounted:
            raise RuntimeError(
                f"ClockedOptimizer.{method}: a backward is not yet counted as a micro step; call "
                "step() first"
            )

    def _refuse_pending(self, method: str) -> None:
        self._refuse_broken(method)
        self._settle_late()
        pending = self._window.is_pending or self._pass.accumulator.has_unseen()
        self._refuse_uncounted(method, is_uncounted=pending)


# torch's schedulers patch `step` of the optimizer they are built on, to learn that it was called,
# unless it carries this mark. Patched copies of a wrapper would step the original.
ClockedOptimizer.step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
