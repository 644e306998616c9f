"""Case 62: what is due fires on updates, once each, whatever the window."""

import pytest
from helpers import clocked_sgd, parameter, run_micro_steps

from stepclock_ext import StepClock

NAN = float("nan")


def fired_over_epochs(opt, w, micro_steps, epochs, name="eval", **interval):
    """(update, micro step) whenever the trigger fired, asked after each micro step and epoch."""
    fired = []

    def ask():
        if opt.clock.due(name, **interval):
            fired.append((opt.clock.update_step, opt.clock.micro_step))

    for _ in range(epochs):
        for _ in range(micro_steps):
            run_micro_steps(opt, w, [1])
            ask()
        opt.end_epoch()
        ask()
    return fired


def test_every_two_updates_fires_at_2_4_6_in_windows_of_4_4_2():
    w = parameter(1.0)
    opt = clocked_sgd(w, gradient_accumulation_steps=4)
    fired = fired_over_epochs(opt, w, micro_steps=10, epochs=2, every=2)
    assert fired == [(2, 8), (4, 14), (6, 20)]


@pytest.mark.parametrize("every", range(1, 8))
@pytest.mark.parametrize("accumulation", [1, 3, 4])
def test_an_interval_fires_at_each_of_its_multiples(every, accumulation):
    w = parameter(1.0)
    opt = clocked_sgd(w, gradient_accumulation_steps=accumulation)
    fired = fired_over_epochs(opt, w, micro_steps=10, epochs=3, every=every)
    assert [update for update, _ in fired] == list(range(every, opt.clock.update_step + 1, every))


def test_nothing_is_due_on_a_skip():
    w = parameter(1.0)
    opt = clocked_sgd(w, gradient_accumulation_steps=2)
    fired = []
    for c in (1, 1, NAN, NAN, 1, NAN, 1):
        run_micro_steps(opt, w, [1, c])
        if opt.clock.due("eval", every=2):
            fired.append((opt.clock.update_step, opt.clock.skipped_updates))
    assert fired == [(2, 0), (4, 3)]


def test_a_trigger_not_asked_at_its_update_does_not_fire_on_a_skip_after_it():
    w = parameter(1.0)
    opt = clocked_sgd(w)
    run_micro_steps(opt, w, [1, 1, NAN])
    assert not opt.clock.due("eval", every=2)
    run_micro_steps(opt, w, [1])
    assert opt.clock.due("eval", every=2)


def test_nothing_is_due_inside_a_window():
    w = parameter(1.0)
    opt = clocked_sgd(w, gradient_accumulation_steps=3)
    run_micro_steps(opt, w, [1, 1, 1, 1])
    assert not opt.clock.due("eval", every=1)
    run_micro_steps(opt, w, [1])
    assert not opt.clock.due("eval", every=1)
    run_micro_steps(opt, w, [1])
    assert opt.clock.due("eval", every=1)


def test_nothing_is_due_before_the_first_update():
    assert not StepClock().due("eval", every=1)


def test_asked_again_at_the_same_update_nothing_fires_twice():
    w = parameter(1.0)
    opt = clocked_sgd(w)
    run_micro_steps(opt, w, [1])
    assert [opt.clock.due("eval", every=1) for _ in range(3)] == [True, False, False]


def test_asked_late_a_multiple_fires_once():
    w = parameter(1.0)
    opt = clocked_sgd(w)
    fired = []
    for update in range(1, 15):
        run_micro_steps(opt, w, [1])
        if update not in (4, 8, 9) and opt.clock.due("eval", every=4):
            fired.append(update)
    assert fired == [5, 10, 12]


def test_two_multiples_missed_are_one_firing():
    w = parameter(1.0)
    opt = clocked_sgd(w)
    run_micro_steps(opt, w, [1] * 9)
    assert opt.clock.due("eval", every=4)
    run_micro_steps(opt, w, [1] * 2)
    assert not opt.clock.due("eval", every=4)


def test_triggers_of_other_names_do_not_disturb_each_other():
    w = parameter(1.0)
    opt = clocked_sgd(w)
    fired = {"log": [], "eval": [], "save": []}
    for update in range(1, 13):
        run_micro_steps(opt, w, [1])
        for name, every in (("log", 2), ("eval", 3), ("save", 6)):
            if opt.clock.due(name, every=every):
                fired[name].append(update)
    assert fired == {"log": [2, 4, 6, 8, 10, 12], "eval": [3, 6, 9, 12], "save": [6, 12]}


def test_after_a_resume_nothing_fires_again_for_the_saved_update():
    w = parameter(1.0)
    opt = clocked_sgd(w, gradient_accumulation_steps=2)
    run_micro_steps(opt, w, [1] * 8)
    assert opt.clock.due("eval", every=2)
    resumed = clocked_sgd(w, gradient_accumulation_steps=2)
    resumed.load_state_dict(opt.state_dict())
    assert not resumed.clock.due("eval", every=2)
    fired = []
    for _ in range(4):
        run_micro_steps(resumed, w, [1, 1])
        if resumed.clock.due("eval", every=2):
            fired.append(resumed.clock.update_step)
    assert fired == [6, 8]


@pytest.mark.parametrize(
    ("every_epochs", "updates"),
    [(0.5, [2, 3, 5, 6]), (1, [3, 6]), (0.1, [1, 2, 3, 4, 5, 6]), (1.5, [5])],
)
def test_parts_of_an_epoch_are_rounded_up_to_updates(every_epochs, updates):
    w = parameter(1.0)
    opt = clocked_sgd(w, gradient_accumulation_steps=4)
    opt.clock.updates_per_epoch = 3
    fired = fired_over_epochs(opt, w, micro_steps=10, epochs=2, every_epochs=every_epochs)
    assert [update for update, _ in fired] == updates


@pytest.mark.parametrize(
    "interval",
    [
        {},
        {"every": 0},
        {"every": -1},
        {"every": 2.5},
        {"every": 1, "every_epochs": 1},
        {"every_epochs": 0.5},  # no plan has said how many updates an epoch has
    ],
)
def test_an_interval_that_means_nothing_is_refused(interval):
    with pytest.raises((TypeError, ValueError), match="every"):
        StepClock().due("eval", **interval)
