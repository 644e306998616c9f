"""Masters, averages, seed and noise are saved: a resumed run is the unbroken one, to the bit."""

import copy
import pickle

import pytest
import torch
from half_training import BAD_MICRO, KINDS, NUM_MICRO, HalfTraining
from sixteen_bit import MAKERS, through_a_file
from tensors import BACKENDS
from tolerance import assert_all_bit_equal, assert_bit_equal, assert_same_state

from stepclock_ext.checkpoint import load_checkpoint, save_checkpoint

each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
each_backend = pytest.mark.parametrize("backend", BACKENDS)
INSIDE = 8  # a micro step in the middle of a window, after an update and a skip
AFTER = 9


def assert_same_run(training, expected):
    assert training.reports == expected.reports[-len(training.reports) :]
    assert_all_bit_equal(training.values(), expected.values())
    assert_same_state(training.opt.state_dict(), expected.opt.state_dict())


@each_backend
@each_kind
def test_a_run_that_stopped_after_any_micro_step_goes_on_to_the_bit(kind, backend):
    whole = HalfTraining(backend=backend, **kind).run()
    outcomes = [sum(f"{what}=True" in r for r in whole.reports) for what in ("updated", "skipped")]
    assert outcomes == [3, 1]
    stopped = HalfTraining(backend=backend, **kind)
    for number in range(1, NUM_MICRO):
        stopped.run(number, number)
        if number not in (1, 3, BAD_MICRO, INSIDE, AFTER):
            continue
        resumed = HalfTraining(backend=backend, seed=number, **kind)
        resumed.resume(through_a_file(stopped.checkpoint()))
        assert_same_state(resumed.opt.state_dict(), stopped.opt.state_dict())
        assert_same_run(resumed.run(number + 1), whole)


@each_kind
@pytest.mark.parametrize("number", [0, INSIDE, AFTER])
def test_a_checkpoint_on_disk_brings_all_of_it_back(tmp_path, number, kind):
    whole = HalfTraining(**kind).run()
    stopped = HalfTraining(**kind).run(last=number)
    path = save_checkpoint(tmp_path, model=stopped.model, optimizer=stopped.opt)
    resumed = HalfTraining(seed=1, **kind).run(last=2)
    load_checkpoint(path, model=resumed.model, optimizer=resumed.opt)
    assert_all_bit_equal(resumed.values(), stopped.values())
    resumed.reports.clear()
    assert_same_run(resumed.run(number + 1), whole)


def by_pickle(value):
    return pickle.loads(pickle.dumps(value))


@each_kind
@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle])
@pytest.mark.parametrize("number", [0, INSIDE, AFTER])
def test_a_copy_goes_on_as_the_original_and_neither_moves_the_other(number, duplicate, kind):
    whole = HalfTraining(**kind).run()
    original = HalfTraining(**kind).run(last=number)
    copied = duplicate(original)
    before = copied.values()
    assert_all_bit_equal(before, original.values())
    original.run(number + 1)
    assert_all_bit_equal(copied.values(), before)
    copied.run(number + 1)
    for run in (original, copied):
        assert_same_run(run, whole)


@pytest.mark.parametrize("kind", [k for k in KINDS.values() if "make" not in k])
@pytest.mark.parametrize("number", [0, INSIDE, AFTER])
def test_the_inner_part_of_a_state_loads_into_the_bare_optimizer(number, kind):
    training = HalfTraining(**kind).run(last=number)
    bare = MAKERS["AdamW"](training.params)
    bare.load_state_dict(training.opt.state_dict())
    assert bare.param_groups[0]["lr"] == training.opt.param_groups[0]["lr"]
    for p, state in training.opt.optimizers[0].state.items():
        for key, value in state.items():
            cast = value if key == "step" else value.to(p.dtype)  # torch's loading casts
            assert_bit_equal(bare.state[p][key], cast)
    assert len(bare.state) == (len(training.params) if number else 0)


@each_kind
def test_a_state_holds_tensors_and_plain_values_alone(kind):
    state = HalfTraining(**kind).run(last=INSIDE).opt.state_dict()
    assert_same_state(through_a_file(state), state)
    own = state["stepclock"]
    masters, ema = own["masters"], own["ema"]
    assert (masters is not None) == kind.get("master_weights", False)
    assert (ema is not None) == kind.get("averages", False)
    assert (own["rounding_seed"] is not None) == ("rounding" in kind)
    assert (own["noise_scale"] is not None) == ("noise_scale" in kind)
    if masters is not None:
        kept = torch.float32 if kind.get("dtype") == torch.float16 else torch.int16
        assert {master.dtype for master in masters.values()} == {kept}
        assert list(masters) == [0, 1, 2, 3]
    if ema is not None:
        assert ema["updates"] == 1
        assert {average.dtype for average in ema["averages"].values()} == {torch.float32}


@each_kind
def test_a_loaded_state_is_not_moved_by_the_run_that_goes_on(kind):
    state = through_a_file(HalfTraining(**kind).run(last=INSIDE).checkpoint())
    before = copy.deepcopy(state["optimizer"]["stepclock"])
    training = HalfTraining(**kind)
    training.resume(state)
    training.run(INSIDE + 1)
    assert_same_state(state["optimizer"]["stepclock"], before)


@each_kind
def test_saving_changes_nothing_in_the_run(kind):
    saving, whole = HalfTraining(**kind), HalfTraining(**kind).run()
    for number in range(1, NUM_MICRO + 1):
        saving.run(number, number)
        saving.checkpoint()
    assert_same_run(saving, whole)


def test_averages_in_strides_come_back_in_strides():
    def make(params):
        values = torch.arange(360.0).reshape(4, 6, 3, 5).bfloat16()
        params[2] = torch.nn.Parameter(values.contiguous(memory_format=torch.channels_last))
        return MAKERS["AdamW"](params)

    training, other = (HalfTraining(averages=True, make=make) for _ in range(2))
    for each in (training, other):
        each.model = torch.nn.ParameterList(each.params)
    training.run(last=AFTER)
    other.resume(through_a_file(training.checkpoint()))
    p, q = training.params[2], other.params[2]
    assert other.ema.average(q).stride() == training.ema.average(p).stride() == p.stride()
    assert_same_run(other.run(AFTER + 1), training.run(AFTER + 1))
