"""Averages of the weights: moved after each update by what the parameter is worth then."""

import math

import pytest
import torch
from fused import (
    UPDATES,
    add_averages,
    add_masters,
    exact_params,
    in_every_way,
    make_rows,
    move_average,
    worth,
)
from tensors import BACKENDS, DTYPES, HALVES, SIZES, clones, dtype_name
from tolerance import assert_all_bit_equal, assert_bit_equal, assert_close

from stepclock_ext import ops

each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
each_half = pytest.mark.parametrize("dtype", HALVES, ids=dtype_name)
each_update = pytest.mark.parametrize("update", UPDATES)
EDGES = [0, 1, 255, 1024, 1025, 16385]
WEIGHT = 0.1


def rows_of(backend, dtype, sizes=EDGES, *, masters=False, averages=True, **options):
    wide = torch.float32 if dtype in HALVES else dtype
    rows = make_rows(backend, sizes, dtype, sums=wide, state=wide, **options)
    if masters:
        add_masters(rows, exact_params(rows.params))
    if averages:
        add_averages(rows)
    return rows


def moved(averages, values, weight):
    """The formula, in the dtype that arithmetic runs in."""
    pairs = zip(map(ops.real_view, averages), map(ops.real_view, values), strict=True)
    results = [average + (value - average) * weight for average, value in pairs]
    return [r.view_as(ops.real_view(a)) for r, a in zip(results, averages, strict=True)]


def assert_moved(rows, before, weight=WEIGHT):
    averages = [ops.real_view(average) for average in rows.averages]
    assert_all_bit_equal(averages, moved(before, worth(rows), weight))


@each_backend
@each_dtype
@each_update
def test_an_update_moves_the_averages_by_the_parameters_that_it_stored(backend, dtype, update):
    rows = rows_of(backend, dtype, unaligned=True)
    params = clones(rows.params)
    for _ in range(3):
        before = clones(rows.averages)
        UPDATES[update](rows, average_weight=WEIGHT)
        assert_moved(rows, before)
    assert all((a != b).any() for a, b in zip(rows.params[2:], params[2:], strict=True))


@each_backend
@each_half
@each_update
def test_averages_of_masters_are_of_the_masters(backend, dtype, update):
    rows = rows_of(backend, dtype, masters=True)
    for _ in range(3):
        before = clones(rows.averages)
        UPDATES[update](rows, average_weight=WEIGHT)
        assert_moved(rows, before)
    rounded = [p.float() for p in rows.params]
    assert all((a != b).any() for a, b in zip(worth(rows)[2:], rounded[2:], strict=True))


@each_backend
@each_half
@each_update
def test_averages_of_stochastically_rounded_parameters_are_of_what_was_stored(
    backend, dtype, update
):
    rows = rows_of(backend, dtype)
    for key in range(3):
        before = clones(rows.averages)
        UPDATES[update](rows, average_weight=WEIGHT, rounding_key=key)
        assert_moved(rows, before)


@each_backend
@each_dtype
@each_update
@pytest.mark.parametrize("rounding_key", [None, 5])
def test_averages_beside_them_change_no_bit_of_parameters_and_states(
    backend, dtype, update, rounding_key
):
    rows, others = (rows_of(backend, dtype, averages=averages) for averages in (True, False))
    UPDATES[update](rows, average_weight=WEIGHT, rounding_key=rounding_key)
    UPDATES[update](others, rounding_key=rounding_key)
    assert_all_bit_equal(rows.written()[: len(others.written())], others.written())


@each_backend
@pytest.mark.parametrize(
    ("dtype", "masters"), [*((d, False) for d in DTYPES), *((d, True) for d in HALVES)]
)
def test_averages_move_alone_and_nothing_else_does(backend, dtype, masters):
    rows = rows_of(backend, dtype, SIZES, masters=masters, unaligned=True)
    before, averages = clones(rows.written()), clones(rows.averages)
    move_average(rows, average_weight=WEIGHT)
    assert_moved(rows, averages)
    num = len(before) - len(averages)
    assert_all_bit_equal(rows.written()[:num], before[:num])


@each_backend
@each_dtype
@pytest.mark.parametrize("weight", [1e-4, 0.3, 1.0])
def test_a_parameter_equal_to_its_average_leaves_the_average_as_it_is(backend, dtype, weight):
    rows = rows_of(backend, dtype)
    rows.averages = worth(rows)
    before = clones(rows.averages)
    move_average(rows, average_weight=weight)
    assert_all_bit_equal(rows.averages, before)


@each_backend
@each_dtype
def test_a_weight_of_zero_moves_no_average(backend, dtype):
    rows = rows_of(backend, dtype)
    before = clones(rows.averages)
    UPDATES["adam"](rows, average_weight=0.0)
    assert_all_bit_equal(rows.averages, before)


@each_backend
@each_dtype
def test_the_average_of_a_parameter_that_stands_still_comes_to_it_geometrically(backend, dtype):
    rows = rows_of(backend, dtype, [300])
    values, first = worth(rows)[0], rows.averages[0].clone()
    num = 20
    for _ in range(num):
        move_average(rows, average_weight=WEIGHT)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    values, first = values.to(wide), first.to(wide)
    expected = values + (first - values) * (1 - WEIGHT) ** num
    assert_close(rows.averages[0], expected, num_roundings=3 * num)


@each_backend
@each_dtype
@each_update
def test_averages_follow_their_parameters_whatever_the_strides(backend, dtype, update):
    size = [2 * 3 * 40 * 110]

    def strided(tensor):
        return tensor.reshape(2, 3, 40, 110).to(memory_format=torch.channels_last)

    rows = rows_of(backend, dtype, size, like=strided)
    before = clones(rows.averages)
    assert not rows.averages[0].is_contiguous()
    UPDATES[update](rows, average_weight=WEIGHT)
    assert_moved(rows, before)


@each_backend
@each_half
def test_an_average_holds_what_its_parameters_dtype_cannot(backend, dtype):
    rows = rows_of(backend, dtype, [3])
    rows.params[0].fill_(1.0)
    rows.averages[0].fill_(1.0 + 2.0**-20)
    move_average(rows, average_weight=0.5)
    assert rows.averages[0].tolist() == [1.0 + 2.0**-21] * 3


@each_backend
def test_a_nan_in_a_parameter_reaches_its_average_and_no_other(backend):
    rows = rows_of(backend, torch.float32, [300])
    rows.params[0][7] = math.nan
    move_average(rows, average_weight=WEIGHT)
    assert rows.averages[0].isnan().nonzero().flatten().tolist() == [7]


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the kernels were not built")
@each_dtype
def test_threads_and_instruction_sets_average_alike(dtype):
    def run():
        rows = rows_of("cpu", dtype, [16385, 0, 16385, 257], masters=dtype in HALVES)
        for update in UPDATES.values():
            update(rows, average_weight=WEIGHT)
        move_average(rows, average_weight=WEIGHT)
        return rows.written()

    results = in_every_way(run)
    for other in results[1:]:
        assert_all_bit_equal(other, results[0])
    assert_bit_equal(results[0][0], results[-1][0])
