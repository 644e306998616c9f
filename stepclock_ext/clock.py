"""The clock of a training run: counters of micro steps, updates and skips, and triggers."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

__all__ = ["StepClock"]

_COUNTERS = (
    "micro_step",
    "update_step",
    "skipped_updates",
    "epoch",
    "micro_step_in_epoch",
    "weight_seen",
    "micro_step_in_window",
)


class StepClock:
    """Counts micro steps, updates and skips, and says when something is due.

    The wrapper moves it; users read it. A window opens with its first micro step and is closed by
    an update, a skip, or by neither (nothing to update with)::

        tick_micro(weight)      micro_step, micro_step_in_epoch, weight_seen move
        tick_update()           update_step + 1, the window is closed
        tick_skip()             skipped_updates + 1, the window is closed; nothing is due
        close_window()          the window is closed, nothing else moves
        join_window(n, weight)  with other processes the open window has n micro steps, this weight
        align(n)                other processes have counted n micro steps
        rewind_window()         the open window's micro steps never happened
        end_epoch()             epoch + 1, the position in the epoch is 0

    Attributes:
        micro_step: forward and backward passes so far.
        update_step: times the parameters changed.
        skipped_updates: complete windows whose gradients were not finite.
        epoch: epochs ended.
        micro_step_in_epoch: position in the data of the current epoch, in micro steps.
        micro_step_in_window: micro steps in the open window; 0 when none is open.
        weight_seen: sum of the weights of the micro batches (tokens, samples, or one each).
        updates_per_epoch: from the plan; only ``due(..., every_epochs=)`` needs it.

    Example:
        >>> clock = StepClock()
        >>> for micro in range(1, 9):
        ...     clock.tick_micro()
        ...     if micro % 2 == 0:
        ...         clock.tick_update()
        ...     if clock.due("eval", every=2):
        ...         print(clock.micro_step, clock.update_step)
        4 2
        8 4
    """

    def __init__(self, *, updates_per_epoch: int | Fraction | None = None) -> None:
        self.micro_step = 0
        self.update_step = 0
        self.skipped_updates = 0
        self.epoch = 0
        self.micro_step_in_epoch = 0
        self.weight_seen: float = 0
        self.micro_step_in_window = 0
        self.updates_per_epoch = updates_per_epoch
        self._window_start = (0, 0, 0.0)
        self._fired: dict[str, int] = {}
        self._fired_all = 0  # nothing up to this update is due any more: the run resumed here
        self._just_updated = False

    def tick_micro(self, weight: float = 1) -> None:
        """Counts a micro step of `weight`; the first one of a window opens it."""
        if self.micro_step_in_window == 0:
            self._window_start = (self.micro_step, self.micro_step_in_epoch, self.weight_seen)
        self.micro_step += 1
        self.micro_step_in_epoch += 1
        self.micro_step_in_window += 1
        self.weight_seen += weight
        self._just_updated = False

    def tick_update(self) -> None:
        """Counts an update and closes the window."""
        self.update_step += 1
        self.close_window()
        self._just_updated = True

    def tick_skip(self) -> None:
        """Counts a skipped update and closes the window."""
        self.skipped_updates += 1
        self.close_window()

    def close_window(self) -> None:
        """Closes the window without an update or a skip."""
        self.micro_step_in_window = 0
        self._just_updated = False

    def drop_window(self) -> None:
        """Closes the window; its micro steps stay counted, its weight was not seen."""
        if self.micro_step_in_window:
            self.weight_seen = self._window_start[2]
        self.close_window()

    def rewind_window(self) -> None:
        """Takes the open window's micro steps, position and weight back."""
        if self.micro_step_in_window:
            self.micro_step, self.micro_step_in_epoch, self.weight_seen = self._window_start
        self.close_window()

    def join_window(self, micro_steps: int, weight: float) -> None:
        """The open window is one of several processes, of which others did more.

        Args:
            micro_steps: of the process that did most in it.
            weight: of the window, over all processes.
        """
        if self.micro_step_in_window == 0:
            self._window_start = (self.micro_step, self.micro_step_in_epoch, self.weight_seen)
        more = micro_steps - self.micro_step_in_window
        self.micro_step += more
        self.micro_step_in_epoch += more
        self.micro_step_in_window += more
        self.weight_seen = self._window_start[2] + weight

    def align(self, micro_step: int) -> None:
        """Between two windows: other processes have counted up to here."""
        self.micro_step = micro_step
        self._window_start = (micro_step, self.micro_step_in_epoch, self.weight_seen)

    def end_epoch(self) -> None:
        """Counts an epoch; an open window stays open (its weight is carried)."""
        self.epoch += 1
        self.micro_step_in_epoch = 0
        micro_step, _, weight_seen = self._window_start
        self._window_start = (micro_step, 0, weight_seen)

    def due(
        self, name: str, *, every: int | None = None, every_epochs: float | str | None = None
    ) -> bool:
        """True once when a multiple was reached since `name` last fired.

        Only right after an update: never inside a window, never on a skip. Asked late, it still
        fires, once. After a resume nothing fires again for an update up to the saved one.

        Args:
            name: the trigger; each name fires on its own.
            every: in updates.
            every_epochs: in epochs, for example 0.5; update ``ceil(k * every_epochs *
                updates_per_epoch)`` is the k-th multiple. Needs ``updates_per_epoch``.

        Raises:
            ValueError: not exactly one of the two is given, or it is not positive, or
                `every_epochs` is given and the clock knows no updates per epoch.
        """
        interval = self._interval(name, every, every_epochs)
        if not self._just_updated:
            return False
        last = max(self._fired.get(name, 0), self._fired_all)
        if self.update_step // interval == last // interval:
            return False
        self._fired[name] = self.update_step
        return True

    def _interval(
        self, name: str, every: int | None, every_epochs: float | str | None
    ) -> int | Fraction:
        """Updates between two multiples, exactly."""
        where = f"StepClock.due({name!r})"
        if (every is None) == (every_epochs is None):
            raise ValueError(
                f"{where}: give either every= or every_epochs=, got every={every!r}, "
                f"every_epochs={every_epochs!r}"
            )
        if every is not None:
            if isinstance(every, bool) or not isinstance(every, int) or every < 1:
                raise ValueError(f"{where}: every must be a positive integer, got {every!r}")
            return every
        if self.updates_per_epoch is None:
            raise ValueError(
                f"{where}: every_epochs needs the updates of an epoch, got updates_per_epoch=None; "
                "set clock.updates_per_epoch, or use every="
            )
        try:
            epochs = Fraction(str(every_epochs))  # the decimal that was written: 0.1 is one tenth
        except ValueError:
            epochs = Fraction(0)
        if epochs <= 0:
            raise ValueError(
                f"{where}: every_epochs must be a positive number, got {every_epochs!r}"
            )
        return epochs * self.updates_per_epoch

    def state_dict(self) -> dict[str, Any]:
        """Counters and fired triggers, as plain Python values."""
        state: dict[str, Any] = {name: getattr(self, name) for name in _COUNTERS}
        state["window_start"] = list(self._window_start)
        state["fired"] = dict(self._fired)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over saved counters. Nothing is due up to the saved update.

        Raises:
            ValueError: `state` is not a clock's state; nothing has changed then.
        """
        missing = [name for name in (*_COUNTERS, "window_start", "fired") if name not in state]
        if missing:
            raise ValueError(f"StepClock.load_state_dict: the state lacks {', '.join(missing)}")
        for name in _COUNTERS:
            kinds = (int, float) if name == "weight_seen" else int
            if not isinstance(state[name], kinds) or state[name] < 0:
                raise ValueError(
                    f"StepClock.load_state_dict: {name} must be a count, got {state[name]!r}"
                )
        micro_step, position, weight_seen = state["window_start"]
        for name in _COUNTERS:
            setattr(self, name, state[name])
        self._window_start = (micro_step, position, weight_seen)
        self._fired = dict(state["fired"])
        self._fired_all = self.update_step
        self._just_updated = False

    def __repr__(self) -> str:
        counters = ", ".join(f"{name}={getattr(self, name)}" for name in _COUNTERS)
        return f"StepClock({counters})"
