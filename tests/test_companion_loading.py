"""States of runs that kept other things: what is dropped or created is said."""

import copy
import warnings

import pytest
import torch
from half_training import HalfTraining
from sixteen_bit import MAKERS, each_half, start_params, through_a_file
from tolerance import assert_all_bit_equal, assert_bit_equal, assert_same_state

from stepclock_ext import EMA

LAST = 9
BOTH = {"master_weights": True, "averages": True}


def saved(*, last=LAST, **options):
    return through_a_file(HalfTraining(**options).run(last=last).checkpoint())


def own_of(training):
    return training.opt.state_dict()["stepclock"]


@each_half
@pytest.mark.parametrize("last", [8, LAST])
def test_masters_are_dropped_by_a_run_without_and_it_says_so(last, dtype):
    checkpoint = saved(dtype=dtype, master_weights=True, last=last)
    training = HalfTraining(dtype=dtype, seed=1)
    with pytest.warns(UserWarning, match="dropped the master weights") as caught:
        training.resume(checkpoint)
    assert len(caught) == 1
    assert own_of(training)["masters"] is None
    weights = list(checkpoint["model"].values())
    assert_all_bit_equal([p.detach() for p in training.params], weights)
    state = checkpoint["optimizer"]["state"]
    for row, p in enumerate(training.params):  # the moments are what they were
        assert_same_state(training.opt.state[p], state[row])
    training.run(last + 1)
    assert training.opt.clock.update_step == 3


@each_half
@pytest.mark.parametrize("last", [8, LAST])
def test_masters_are_created_from_a_state_without_and_it_says_so(last, dtype):
    plain = HalfTraining(dtype=dtype).run(last=last)
    training = HalfTraining(dtype=dtype, seed=1, master_weights=True).run(last=3)
    with pytest.warns(UserWarning, match="created master weights") as caught:
        training.resume(through_a_file(plain.checkpoint()))
    assert len(caught) == 1
    values = [training.opt.master_weight(p) for p in training.params]
    assert_all_bit_equal(values, [p.detach().float() for p in plain.params])
    training.run(last + 1, 12)
    assert list(own_of(training)["masters"]) == [0, 1, 2, 3]
    values = [training.opt.master_weight(p) for p in training.params]
    assert any(not torch.equal(v, p.float()) for v, p in zip(values, training.params, strict=True))


def test_a_state_with_no_master_yet_is_said_nothing_about():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HalfTraining().resume(saved(master_weights=True, last=0))


@each_half
def test_averages_are_dropped_by_a_run_without_and_it_says_so(dtype):
    training = HalfTraining(dtype=dtype, seed=1)
    with pytest.warns(UserWarning, match="dropped the averaged weights") as caught:
        training.resume(saved(dtype=dtype, averages=True))
    assert len(caught) == 1
    assert own_of(training)["ema"] is None
    without = HalfTraining(dtype=dtype).run()
    training.run(LAST + 1)
    assert_all_bit_equal(training.values(), without.values())


@each_half
@pytest.mark.parametrize("masters", [False, True])
def test_averages_start_anew_from_a_state_without_and_it_says_so(masters, dtype):
    options = {"dtype": dtype, "master_weights": masters}
    training = HalfTraining(averages=True, seed=1, **options).run(last=LAST)
    with pytest.warns(UserWarning, match="averages start from the parameters") as caught:
        training.resume(saved(**options))
    assert len(caught) == 1
    assert training.ema.updates == 0
    before = [training.opt.master_weight(p) for p in training.params]
    training.run(LAST + 1)  # one update, in which averages move by 9/11
    for p, start in zip(training.params, before, strict=True):
        now = training.opt.master_weight(p).double()
        expected = start.double() * 2 / 11 + now * 9 / 11
        limit = 2.0**-21 * (1 + expected.abs())  # a few roundings of fp32
        assert ((training.ema.average(p).double() - expected).abs() <= limit).all()


def test_the_state_of_a_bare_optimizer_says_what_starts_anew():
    training = HalfTraining(**BOTH).run(last=LAST)
    bare = MAKERS["AdamW"](start_params(torch.bfloat16, shapes=[p.shape for p in training.params]))
    with pytest.warns(UserWarning) as caught:
        training.opt.load_state_dict(bare.state_dict())
    said = sorted(str(warning.message) for warning in caught)
    assert len(said) == 2
    assert "created master weights" in said[0]
    assert "averages start" in said[1]
    assert training.ema.updates == 0
    values = [training.opt.master_weight(p) for p in training.params]
    assert_all_bit_equal(values, [p.detach().float() for p in training.params])


@pytest.mark.parametrize("origin", [torch.bfloat16, torch.float16])
def test_masters_beside_another_dtype_are_dropped_and_it_says_so(origin):
    other = {torch.bfloat16: torch.float16, torch.float16: torch.bfloat16}[origin]
    training = HalfTraining(dtype=other, master_weights=True, seed=1)
    with pytest.warns(UserWarning, match="dropped the masters of 4 parameters"):
        training.opt.load_state_dict(saved(dtype=origin, master_weights=True)["optimizer"])
    values = [training.opt.master_weight(p) for p in training.params]
    assert_all_bit_equal(values, [p.detach().float() for p in training.params])
    for state in training.opt.optimizers[0].state.values():
        assert state["exp_avg"].dtype == torch.float32
    training.run(LAST + 1)
    assert training.opt.clock.update_step == 3


def test_averages_of_another_run_come_in_this_runs_dtype():
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    state = HalfTraining(averages=True).run(last=LAST).opt.state_dict()["stepclock"]["ema"]
    ema = EMA(decay=0.9)
    ema.load_state_dict([p], {**state, "averages": {0: state["averages"][0]}})
    assert_bit_equal(ema.average(p), state["averages"][0].double())


def test_a_seed_is_taken_over_and_a_run_that_rounds_to_nearest_has_none():
    checkpoint = saved(rounding="stochastic")
    training = HalfTraining(rounding="stochastic", seed=5)
    assert own_of(training)["rounding_seed"] == 5
    training.resume(checkpoint)
    assert own_of(training)["rounding_seed"] == 0
    nearest = HalfTraining()
    nearest.resume(checkpoint)
    assert own_of(nearest)["rounding_seed"] is None


@pytest.mark.parametrize("here", [BOTH, {}])
def test_a_warning_that_is_made_an_error_leaves_no_half_loaded_run(here):
    """``python -W error``: the load has happened, or it has not."""
    there = {} if here else BOTH
    checkpoint = saved(**there)
    training = HalfTraining(seed=1, **here).run(last=3)
    before = copy.deepcopy(training.opt.state_dict())
    whole = HalfTraining(seed=1, **here).run(last=3)
    with pytest.warns(UserWarning):
        whole.opt.load_state_dict(checkpoint["optimizer"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning):
            training.opt.load_state_dict(checkpoint["optimizer"])
    now = training.opt.state_dict()
    loaded = now["stepclock"]["clock"]["micro_step"] == LAST
    assert_same_state(now, whole.opt.state_dict() if loaded else before)


def test_the_warning_points_at_the_line_that_loads():
    checkpoint = saved(master_weights=True)
    with pytest.warns(UserWarning) as caught:
        HalfTraining().opt.load_state_dict(checkpoint["optimizer"])
    assert caught[0].filename == __file__


def put(state, *path_and_value):
    *parents, last, value = path_and_value
    for key in parents:
        state = state["stepclock"][key] if key in ("masters", "ema") else state[key]
    (state if parents else state["stepclock"])[last] = value


DAMAGE = {
    "a master of another shape": ("masters", 0, torch.zeros(4, dtype=torch.int16)),
    "a master of an unknown row": ("masters", 4, torch.zeros(3, dtype=torch.int16)),
    "a master that is no tensor": ("masters", 0, 1.0),
    "masters that are no dict": ("masters", [1, 2]),
    "an average of another shape": ("ema", "averages", 0, torch.zeros(4)),
    "an average of an unknown row": ("ema", "averages", -1, torch.zeros(3)),
    "an average that is no tensor": ("ema", "averages", 0, None),
    "averages that are no dict": ("ema", "averages", 7),
    "updates that are no number": ("ema", "updates", "many"),
    "an ema that is no dict": ("ema", 3),
    "an ema without averages": ("ema", {"updates": 1}),
    "a seed that is no number": ("rounding_seed", "abc"),
    "a noise scale of other fields": ("noise_scale", {"colour": 1}),
    "micro norms without a total": ("micro_norms", {"num_micro": 1}),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("here", [BOTH, {}], ids=["with both", "without"])
def test_a_damaged_state_is_refused_and_changes_nothing(here, damage):
    checkpoint = saved(noise_scale=True, **BOTH)
    put(checkpoint["optimizer"], *damage)
    training = HalfTraining(seed=1, **here).run(last=8)
    before, values = copy.deepcopy(training.opt.state_dict()), training.values()
    with pytest.raises(ValueError, match="load_state_dict"):
        training.opt.load_state_dict(checkpoint["optimizer"])
    assert_same_state(training.opt.state_dict(), before)
    assert_all_bit_equal(training.values(), values)
    whole = HalfTraining(seed=1, **here).run()
    assert_all_bit_equal(training.run(LAST).values(), whole.values())


def test_the_state_of_a_release_without_companions_loads():
    checkpoint = saved()
    for key in ("masters", "ema", "rounding_seed", "noise_scale", "micro_norms"):
        del checkpoint["optimizer"]["stepclock"][key]
    training = HalfTraining(seed=1)
    training.resume(checkpoint)
    assert_all_bit_equal(training.run(LAST + 1).values(), HalfTraining().run().values())
