"""Checkpoints at every micro step, copies, and loads that fail."""

import copy
import io
import pickle

import pytest
import torch
from helpers import run_micro_steps
from tolerance import assert_all_bit_equal, assert_same_state
from training import MAKERS, NUM_MICRO, SIZES, Training

from stepclock_ext import ClockedOptimizer

each_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
INSIDE = 6  # a micro step in the middle of a window
PLAIN = (bool, int, float, str, type(None))


def find_leaves(state):
    """Everything in `state` that is no container."""
    if isinstance(state, dict):
        yield from (leaf for pair in state.items() for part in pair for leaf in find_leaves(part))
    elif isinstance(state, (list, tuple)):
        yield from (leaf for part in state for leaf in find_leaves(part))
    else:
        yield state


def by_file(checkpoint):
    """What a file gives back."""
    file = io.BytesIO()
    torch.save(checkpoint, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_same_run(training, expected):
    assert training.reports == expected.reports[-len(training.reports) :]
    assert_all_bit_equal(training.values(), expected.values())
    assert_same_state(training.opt.state_dict(), expected.opt.state_dict())


@each_maker
def test_a_run_that_stopped_after_any_micro_step_goes_on_to_the_bit(make):
    whole = Training(make).run()
    for outcome, times in (("updated", 2), ("skipped", 1), ("due", 1)):
        assert sum(f"{outcome}=True" in report for report in whole.reports) == times
    stopped = Training(make)
    for number in range(1, NUM_MICRO):
        stopped.micro(number)
        resumed = Training(make, seed=number)
        resumed.resume(by_file(stopped.checkpoint()))
        assert_same_state(resumed.opt.state_dict(), stopped.opt.state_dict())
        resumed.run(number + 1)
        assert_same_run(resumed, whole)


@each_maker
def test_after_the_last_update_nothing_is_due_again_in_the_resumed_run(make):
    whole = Training(make).run()
    assert whole.opt.clock.update_step == 2
    resumed = Training(make)
    resumed.resume(whole.checkpoint())
    assert not resumed.opt.clock.due("eval", every=2)
    assert not resumed.opt.clock.due("never asked before", every=1)


@each_maker
@pytest.mark.parametrize("last", [0, INSIDE, NUM_MICRO])
def test_a_state_survives_pickle_and_file_key_by_key_and_holds_plain_values(make, last):
    state = Training(make).run(last=last).opt.state_dict()
    assert_same_state(pickle.loads(pickle.dumps(state)), state)
    assert_same_state(by_file(state), state)
    assert all(isinstance(leaf, (torch.Tensor, *PLAIN)) for leaf in find_leaves(state))


@each_maker
def test_a_saved_state_is_not_moved_by_the_run_that_goes_on(make):
    training = Training(make).run(last=INSIDE)
    own = training.opt.state_dict()["stepclock"]
    before = copy.deepcopy(own)
    training.run(INSIDE + 1)
    assert_same_state(own, before)


@each_maker
def test_a_loaded_state_is_not_moved_by_the_run_that_goes_on(make):
    checkpoint = by_file(Training(make).run(last=INSIDE).checkpoint())
    before = copy.deepcopy(checkpoint)
    training = Training(make)
    training.resume(checkpoint)
    training.run(INSIDE + 1)
    assert_same_state(checkpoint["optimizer"]["stepclock"], before["optimizer"]["stepclock"])


@each_maker
def test_loading_replaces_an_open_window(make):
    whole = Training(make).run()
    checkpoint = by_file(Training(make).run(last=4).checkpoint())
    other = Training(make, seed=1).run(last=2)
    other.resume(checkpoint)
    other.reports.clear()
    assert_same_run(other.run(5), whole)


def by_pickle(training):
    return pickle.loads(pickle.dumps(training))


@each_maker
@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle])
@pytest.mark.parametrize("last", [0, 4, INSIDE])
def test_a_copy_goes_on_as_the_original_and_neither_moves_the_other(make, duplicate, last):
    whole = Training(make).run()
    original = Training(make).run(last=last)
    copied = duplicate(original)
    copied_values = copied.values()
    assert_all_bit_equal(copied_values, original.values())
    original.run(last + 1)
    assert_all_bit_equal(copied.values(), copied_values)
    original_values = original.values()
    copied.run(last + 1)
    assert_all_bit_equal(original.values(), original_values)
    assert_same_run(original, whole)
    assert_same_run(copied, whole)


def pop(state, *path):
    """Takes the entry at `path` out of nested dicts."""
    *parents, last = path
    for key in parents:
        state = state[key]
    return state.pop(last)


def put(state, *path_and_value):
    *parents, last, value = path_and_value
    for key in parents:
        state = state[key]
    state[last] = value


OWN = ["version", "clock", "window", "accumulators", "loss_scale", "consecutive_skips"]
CLOCK = ["micro_step", "update_step", "skipped_updates", "epoch", "micro_step_in_epoch"]
CLOCK += ["weight_seen", "micro_step_in_window", "window_start", "fired"]
DAMAGE = {
    "no groups": lambda s: s.pop("param_groups"),
    "no state": lambda s: s.pop("state"),
    "one group more": lambda s: s["param_groups"].append(s["param_groups"][0]),
    "one parameter less": lambda s: s["param_groups"][-1]["params"].pop(),
    "another version": lambda s: put(s, "stepclock", "version", 99),
    "no dynamic scale": lambda s: put(s, "stepclock", "loss_scale", None),
    "a static scale": lambda s: put(s, "stepclock", "loss_scale", 8.0),
    "a scale below zero": lambda s: put(s, "stepclock", "loss_scale", "scale", -1.0),
    "a scale of other fields": lambda s: put(s, "stepclock", "loss_scale", "colour", 1),
    "one scheduler less": lambda s: s["stepclock"]["schedulers"].pop(),
    "a window of other fields": lambda s: put(s, "stepclock", "window", "colour", 1),
    "no schedulers": lambda s: pop(s, "stepclock", "schedulers"),
    "no window scale": lambda s: pop(s, "stepclock", "window", "scale"),
    "another shape": lambda s: put(s, "stepclock", "accumulators", 0, torch.ones(4)),
    "another dtype": lambda s: put(s, "stepclock", "accumulators", 0, torch.ones(3).double()),
    "an unknown row": lambda s: put(s, "stepclock", "accumulators", len(SIZES), torch.ones(3)),
    "an own state of another type": lambda s: put(s, "stepclock", 5),
    **{f"no {key}": lambda s, key=key: pop(s, "stepclock", key) for key in OWN},
    **{f"no clock {key}": lambda s, key=key: pop(s, "stepclock", "clock", key) for key in CLOCK},
}


@pytest.mark.parametrize("make", [MAKERS["AdamW"], MAKERS["two optimizers"]], ids=["one", "two"])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_load_that_fails_changes_nothing(make, damage):
    state = Training(make, seed=1).run(last=INSIDE).opt.state_dict()
    damage(state)
    training = Training(make).run(last=2)
    before, values = copy.deepcopy(training.opt.state_dict()), training.values()
    with pytest.raises((ValueError, TypeError)):
        training.opt.load_state_dict(state)
    assert_same_state(training.opt.state_dict(), before)
    assert_all_bit_equal(training.values(), values)
    assert_same_run(training.run(3), Training(make).run())


@pytest.mark.parametrize("state", [None, 5, [], "state"])
def test_what_is_no_dict_is_refused_and_changes_nothing(state):
    training = Training(MAKERS["AdamW"]).run(last=2)
    before = copy.deepcopy(training.opt.state_dict())
    with pytest.raises(TypeError):
        training.opt.load_state_dict(state)
    assert_same_state(training.opt.state_dict(), before)


def trained_adamw():
    w = torch.nn.Parameter(torch.ones(2))
    opt = ClockedOptimizer(torch.optim.AdamW([w], lr=0.1))
    opt.attach(torch.optim.lr_scheduler.LambdaLR(opt, lambda u: 1.0))
    run_micro_steps(opt, w, [1, 1])
    return w, opt


DAMAGES = {
    "another scheduler": (
        lambda state: state["stepclock"]["schedulers"][0]["state"].pop("lr_lambdas"),
        "the state's scheduler must be a LambdaLR",
    ),
    "no dict": (lambda state: state["state"].update({0: None}), "state 0 must be a dict, got None"),
    "another shape": (
        lambda state: state["state"][0].update(exp_avg=torch.ones(7)),
        r"'exp_avg' of state 0 is \(7,\), its parameter \(2,\)",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_state_that_an_update_would_stumble_over_is_refused_and_changes_nothing(damage, message):
    w, opt = trained_adamw()
    state = copy.deepcopy(opt.state_dict())
    damage(state)
    before = copy.deepcopy((opt.state_dict()["stepclock"]["clock"], opt.state[w]))
    with pytest.raises(ValueError, match=message):
        opt.load_state_dict(state)
    after = (opt.state_dict()["stepclock"]["clock"], opt.state[w])
    assert before[0] == after[0]
    assert all(torch.equal(before[1][key], after[1][key]) for key in before[1])
