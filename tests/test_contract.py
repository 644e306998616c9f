"""The door of every op: what does not fit is refused by a clear error, and nothing is written."""

import pytest
import torch
from tensors import BACKENDS, clones, layout_of, random_list, square_list
from tolerance import assert_all_bit_equal

from stepclock_ext import ops

each_backend = pytest.mark.parametrize("backend", BACKENDS)
SIZES = [40, 0, 300]


def arguments():
    """Every list that an op takes, by the name of its column."""
    return {
        "GRAD": random_list(SIZES, torch.float32, seed=1),
        "ACCUMULATOR": random_list(SIZES, torch.float32, seed=2),
        "PARAM": random_list(SIZES, torch.float32, seed=3),
        "EXP_AVG": random_list(SIZES, torch.float32, seed=4),
        "EXP_AVG_SQ": square_list(SIZES, torch.float32, seed=5),
        "MAX_EXP_AVG_SQ": square_list(SIZES, torch.float32, seed=6),
        "BUFFER": random_list(SIZES, torch.float32, seed=7),
        "STEP": [torch.tensor(1.0) for _ in SIZES],
    }


def run_adam(lists, slots, stats, layout):
    flags = dict(weight_decay=0.1, decoupled=True, amsgrad=True, maximize=False)
    scalars = ops.AdamScalars(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, **flags)
    states = ops.AdamStates(
        lists["STEP"], lists["EXP_AVG"], lists["EXP_AVG_SQ"], lists["MAX_EXP_AVG_SQ"]
    )
    ops.adam_(lists["PARAM"], states, lists["ACCUMULATOR"], stats, layout, scalars)


def run_sgd(lists, slots, stats, layout):
    flags = dict(weight_decay=0.1, nesterov=False, maximize=False, first=False)
    scalars = ops.SgdScalars(lr=0.1, momentum=0.9, dampening=0.0, **flags)
    ops.sgd_(lists["PARAM"], lists["BUFFER"], lists["ACCUMULATOR"], stats, layout, scalars)


def run_accumulate(lists, slots, stats, layout):
    ops.accumulate_(lists["ACCUMULATOR"], lists["GRAD"], layout, slots=slots)


def run_coefficient(lists, slots, stats, layout):
    ops.coefficient_(stats, slots, layout, divisor=1.0, max_norm=1.0)


OPS = {
    "sum_squares_": lambda ls, slots, _, layout: ops.sum_squares_(slots, ls["ACCUMULATOR"], layout),
    "max_abs_": lambda ls, slots, _, layout: ops.max_abs_(slots, ls["ACCUMULATOR"], layout),
    "scale_": lambda ls, _, stats, layout: ops.scale_(ls["ACCUMULATOR"], stats, layout),
    "accumulate_": run_accumulate,
    "coefficient_": run_coefficient,
    "adam_": run_adam,
    "sgd_": run_sgd,
}
COLUMNS = {
    "sum_squares_": ["ACCUMULATOR"],
    "max_abs_": ["ACCUMULATOR"],
    "scale_": ["ACCUMULATOR"],
    "accumulate_": ["ACCUMULATOR", "GRAD"],
    "adam_": ["PARAM", "ACCUMULATOR", "EXP_AVG", "EXP_AVG_SQ", "MAX_EXP_AVG_SQ"],
    "sgd_": ["PARAM", "ACCUMULATOR", "BUFFER"],
}
MISFITS = {
    "another dtype": (TypeError, lambda t: t.double()),
    "a narrower dtype": (TypeError, lambda t: t.half()),
    "complex values": (TypeError, lambda t: torch.complex(t, t)),
    "fewer elements": (TypeError, lambda t: t[:-1].clone()),
    "more elements": (TypeError, lambda t: torch.cat([t, t])),
    "gaps in memory": (ValueError, lambda t: t.repeat_interleave(2)[::2]),
    "one value for all": (ValueError, lambda t: t[:1].expand(t.shape)),
}


def refuse(backend, op, lists, error, match, *, slots=None, stats=None):
    """`op` raises, with everything it was given as it was."""
    layout = layout_of(backend, arguments()["GRAD"])
    slots = ops.make_slots(layout.num_slots) if slots is None else slots
    stats = ops.make_stats() if stats is None else stats
    given = [t for tensors in lists.values() for t in tensors] + [slots, stats]
    before = clones(given)
    with pytest.raises(error, match=match):
        OPS[op](lists, slots, stats, layout)
    assert_all_bit_equal(given, before)


@each_backend
@pytest.mark.parametrize("misfit", MISFITS)
@pytest.mark.parametrize(("op", "column"), [(op, c) for op, cs in COLUMNS.items() for c in cs])
def test_a_tensor_unlike_its_row_is_refused_by_name_and_nothing_is_written(
    backend, op, column, misfit
):
    error, change = MISFITS[misfit]
    lists = arguments()
    lists[column][2] = change(lists[column][2])
    refuse(backend, op, lists, error, rf"^{column} 2: ")


@each_backend
@pytest.mark.parametrize(("op", "column"), [(op, c) for op, cs in COLUMNS.items() for c in cs])
def test_a_list_of_another_length_is_refused_and_nothing_is_written(backend, op, column):
    lists = arguments()
    lists[column].pop()
    refuse(backend, op, lists, ValueError, rf"^{column}: must be 3 tensors, got 2")


@each_backend
@pytest.mark.parametrize(
    "step", [torch.zeros((), dtype=torch.float64), torch.zeros(2), torch.zeros(0)]
)
def test_a_step_that_is_not_one_fp32_value_is_refused_and_nothing_is_written(backend, step):
    lists = arguments()
    lists["STEP"][2] = step
    refuse(backend, "adam_", lists, TypeError, r"^STEP 2: must be one fp32 value")


@each_backend
@pytest.mark.parametrize("op", ["sum_squares_", "max_abs_", "accumulate_"])
@pytest.mark.parametrize(
    "slots",
    [
        torch.zeros(8, dtype=torch.float64)[:1],
        torch.zeros(8),
        torch.zeros(8, dtype=torch.float64)[::4],
    ],
    ids=["too few", "fp32", "gaps"],
)
def test_slots_that_do_not_fit_are_refused_and_nothing_is_written(backend, op, slots):
    refuse(backend, op, arguments(), ValueError, "^slots must be fp64", slots=slots)


@each_backend
@pytest.mark.parametrize("op", ["coefficient_", "scale_", "adam_", "sgd_"])
@pytest.mark.parametrize(
    "stats",
    [
        torch.zeros(8, dtype=torch.float64)[:2],
        torch.zeros(8)[:3],
        torch.zeros(8, dtype=torch.float64)[:6:2],
    ],
    ids=["too few", "fp32", "gaps"],
)
def test_stats_that_do_not_fit_are_refused_and_nothing_is_written(backend, op, stats):
    refuse(backend, op, arguments(), ValueError, "^stats must be fp64", stats=stats)


@each_backend
@pytest.mark.parametrize(
    "slots", [torch.zeros(8), torch.zeros(8, dtype=torch.float64)[::4]], ids=["fp32", "gaps"]
)
def test_a_coefficient_of_slots_that_do_not_fit_is_refused(backend, slots):
    refuse(backend, "coefficient_", {}, ValueError, "^slots must be fp64", slots=slots)


@each_backend
@pytest.mark.parametrize("op", ["accumulate_", "adam_", "sgd_"])
@pytest.mark.parametrize("same_list", [False, True], ids=["another list", "the same list"])
def test_a_tensor_whose_memory_was_replaced_is_refused_each_time(backend, op, same_list):
    lists, layout = arguments(), layout_of(backend, arguments()["GRAD"])
    slots, stats = ops.make_slots(layout.num_slots), ops.make_stats()
    OPS[op](lists, slots, stats, layout)
    column = COLUMNS[op][0]
    memory = torch.zeros(300)
    lists[column][2].data = memory[:8]
    if not same_list:
        lists[column] = list(lists[column])
    given = [memory, slots, stats] + [t for tensors in lists.values() for t in tensors]
    before = clones(given)
    for _ in range(2):
        with pytest.raises(TypeError, match=f"^{column} 2: must hold 300 values"):
            OPS[op](lists, slots, stats, layout)
        assert_all_bit_equal(given, before)
