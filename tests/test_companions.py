"""Masters and averages that do not fit are refused by name, before anything is written."""

import pytest
import torch
from fused import UPDATES, add_averages, add_masters, exact_params, make_rows, move_average
from tensors import BACKENDS, HALVES, REALS, clones, dtype_name
from tolerance import assert_all_bit_equal

from stepclock_ext import ops

each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_half = pytest.mark.parametrize("dtype", HALVES, ids=dtype_name)
OPS = {**UPDATES, "move_average": move_average}
each_op = pytest.mark.parametrize("op", OPS)
COLUMNS = {"MASTER": "masters", "AVERAGE": "averages"}
each_column = pytest.mark.parametrize("column", COLUMNS)
MISFITS = {
    "fewer elements": (TypeError, lambda t: t[:-1].clone()),
    "more elements": (TypeError, lambda t: torch.cat([t, t])),
    "fp64": (TypeError, lambda t: t.double()),
    "int32": (TypeError, lambda t: t.to(torch.int32)),
    "gaps in memory": (ValueError, lambda t: t.repeat_interleave(2)[::2]),
    "one value for all": (ValueError, lambda t: t[:1].expand(t.shape)),
}


def rows_of(backend, dtype):
    wide = torch.float32 if dtype in HALVES else dtype
    rows = make_rows(backend, [40, 0, 300], dtype, sums=wide, state=wide)
    add_masters(rows, exact_params(rows.params))
    add_averages(rows)
    return rows


def refuse(op, rows, error, match):
    """`op` raises, with everything it was given as it was."""
    given = [*rows.written(), *rows.sums]
    before = clones(given)
    with pytest.raises(error, match=match):
        OPS[op](rows, average_weight=0.5)
    assert_all_bit_equal(given, before)


@each_backend
@each_half
@each_op
@each_column
@pytest.mark.parametrize("misfit", MISFITS)
def test_a_companion_unlike_its_row_is_refused_by_name_and_nothing_is_written(
    backend, dtype, op, column, misfit
):
    rows, (error, change) = rows_of(backend, dtype), MISFITS[misfit]
    tensors = getattr(rows, COLUMNS[column])
    tensors[2] = change(tensors[2])
    refuse(op, rows, error, rf"^{column} 2: ")


@each_backend
@each_op
@pytest.mark.parametrize(
    ("dtype", "master", "wanted"),
    [
        (torch.bfloat16, torch.float32, "int16"),
        (torch.bfloat16, torch.bfloat16, "int16"),
        (torch.float16, torch.int16, "float32"),
        (torch.float16, torch.float16, "float32"),
    ],
    ids=dtype_name,
)
def test_a_master_of_the_other_kind_is_refused_with_the_dtype_that_is_wanted(
    backend, op, dtype, master, wanted
):
    rows = rows_of(backend, dtype)
    rows.masters[0] = torch.zeros(40, dtype=master)
    refuse(op, rows, TypeError, rf"^MASTER 0: must hold 40 values of torch\.{wanted}, got")


@each_backend
@each_op
@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [
        (torch.bfloat16, "float32"),
        (torch.float16, "float32"),
        (torch.float32, "float32"),
        (torch.float64, "float64"),
        (torch.complex64, "float32"),
    ],
    ids=dtype_name,
)
def test_an_average_is_fp32_beside_16_bits_and_else_of_its_rows_dtype(backend, op, dtype, wanted):
    rows = rows_of(backend, dtype)
    OPS[op](rows, average_weight=0.5)
    for other in REALS:
        if str(other) == f"torch.{wanted}":
            continue
        rows.averages[2] = torch.zeros(ops.num_real(rows.params[2]), dtype=other)
        refuse(op, rows, TypeError, rf"^AVERAGE 2: must hold \d+ values of torch\.{wanted}, got")


@each_backend
@each_half
@each_op
@each_column
def test_a_list_of_companions_of_another_length_is_refused(backend, dtype, op, column):
    rows = rows_of(backend, dtype)
    getattr(rows, COLUMNS[column]).pop()
    refuse(op, rows, ValueError, rf"^{column}: must be 3 tensors, got 2")


@each_backend
@each_half
@each_op
@each_column
@pytest.mark.parametrize("same_list", [False, True], ids=["another list", "the same list"])
def test_a_companion_whose_memory_was_replaced_is_refused_each_time(
    backend, dtype, op, column, same_list
):
    rows = rows_of(backend, dtype)
    OPS[op](rows, average_weight=0.5)
    name = COLUMNS[column]
    tensor = getattr(rows, name)[2]
    tensor.data = torch.zeros(300, dtype=tensor.dtype)[:8]
    if not same_list:
        setattr(rows, name, list(getattr(rows, name)))
    for _ in range(2):
        refuse(op, rows, TypeError, f"^{column} 2: must hold 300 values")
