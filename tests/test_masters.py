"""Masters: a 16-bit parameter with one moves bit for bit as an fp32 parameter does."""

import pytest
import torch
from fused import (
    PLAIN_SGD,
    UPDATES,
    adam,
    add_averages,
    add_masters,
    exact_params,
    in_every_way,
    make_rows,
    sgd,
    worth,
)
from tensors import BACKENDS, HALVES, clones, dtype_name, random_list
from test_update_kernels import ADAM_FLAGS, SGD_FLAGS, flag_names
from tolerance import assert_all_bit_equal, assert_bit_equal

from stepclock_ext import ops

each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_half = pytest.mark.parametrize("dtype", HALVES, ids=dtype_name)
each_update = pytest.mark.parametrize("update", UPDATES)
needs_cpu = pytest.mark.skipif("cpu" not in BACKENDS, reason="the kernels were not built")
SIZES = [0, 1, 255, 1024, 1025, 16383, 16385]
NUM_UPDATES = 4


def twins(backend, dtype, sizes=SIZES, *, averages=False, **options):
    """16-bit rows with masters, and the fp32 rows that they should be."""
    wide = torch.float32
    rows = make_rows(backend, sizes, dtype, sums=wide, state=wide, **options)
    others = make_rows(backend, sizes, wide, **options)
    others.params = clones(exact_params(rows.params))
    add_masters(rows, exact_params(rows.params))
    if averages:
        add_averages(others)
        rows.averages = clones(others.averages)
    return rows, others


def next_sums(rows, update):
    """Sums as no update before had them."""
    sizes = [t.numel() for t in rows.sums]
    values = random_list(sizes, torch.float32, seed=50 + update)
    for total, new in zip(rows.sums, values, strict=True):
        total.copy_(new.view_as(total))


def assert_twins(rows, others):
    """Equal in worth and state; and each parameter is what its worth rounds to."""
    assert_all_bit_equal(worth(rows), others.params)
    for param, exact in zip(rows.params, others.params, strict=True):
        is_bf16 = param.dtype == torch.bfloat16
        assert_bit_equal(param, ops.split(exact)[0] if is_bf16 else exact.to(param.dtype))
    names = ("buffers", "steps", "averages")
    columns = [*zip(rows.moments, others.moments, strict=True)]
    columns += [(getattr(rows, name), getattr(others, name)) for name in names]
    for got, want in columns:
        assert_all_bit_equal(got or [], want or [])


@each_backend
@each_half
@pytest.mark.parametrize("flags", ADAM_FLAGS, ids=flag_names)
def test_adam_moves_masters_as_it_moves_fp32_parameters(backend, dtype, flags):
    rows, others = twins(backend, dtype, unaligned=flags["maximize"])
    before = clones(worth(rows))
    for update in range(NUM_UPDATES):
        for each in (rows, others):
            next_sums(each, update)
            adam(each, flags)
        assert_twins(rows, others)
    assert all((a != b).any() for a, b in zip(worth(rows)[1:], before[1:], strict=True))


@each_backend
@each_half
@pytest.mark.parametrize("flags", SGD_FLAGS, ids=flag_names)
def test_sgd_moves_masters_as_it_moves_fp32_parameters(backend, dtype, flags):
    rows, others = twins(backend, dtype, unaligned=flags["maximize"])
    for update in range(NUM_UPDATES):
        for each in (rows, others):
            next_sums(each, update)
            sgd(each, {**flags, "lr": PLAIN_SGD["lr"]}, first=update == 0)
        assert_twins(rows, others)


@each_backend
@each_half
@each_update
def test_averages_and_keys_beside_masters_are_those_of_fp32_parameters(backend, dtype, update):
    rows, others = twins(backend, dtype, averages=True)
    for number in range(NUM_UPDATES):
        for each in (rows, others):
            next_sums(each, number)
            UPDATES[update](each, average_weight=0.1, rounding_key=number)
        assert_twins(rows, others)


@each_backend
@each_half
@each_update
def test_masters_follow_their_parameters_whatever_the_strides(backend, dtype, update):
    size = [2 * 3 * 40 * 110]

    def strided(tensor):
        return tensor.reshape(2, 3, 40, 110).to(memory_format=torch.channels_last)

    rows, others = twins(backend, dtype, size, like=strided)
    assert not rows.params[0].is_contiguous()
    for each in (rows, others):
        UPDATES[update](each)
    assert_twins(rows, others)


@each_backend
@each_half
@pytest.mark.parametrize("state", HALVES, ids=dtype_name)
def test_masters_stand_beside_16_bit_sums_and_states(backend, dtype, state):
    rows = make_rows(backend, SIZES, dtype, state=state)
    others = make_rows(backend, SIZES, torch.float32, state=state)
    others.params = clones(exact_params(rows.params))
    others.sums = [t.float() for t in rows.sums]
    add_masters(rows, exact_params(rows.params))
    for update in (adam, UPDATES["momentum"]):
        update(rows)
        update(others)
        assert_twins(rows, others)


@needs_cpu
@each_half
@pytest.mark.parametrize("update", ["sgd", "momentum"])
def test_sgds_kernel_moves_masters_as_its_specification_to_the_bit(dtype, update):
    rows, others = (twins(backend, dtype)[0] for backend in ("cpu", "reference"))
    for each in (rows, others):
        UPDATES[update](each)
    assert_all_bit_equal(rows.written(), others.written())


@needs_cpu
@each_half
@each_update
def test_threads_and_instruction_sets_move_masters_alike(dtype, update):
    def run():
        rows, _ = twins("cpu", dtype, [16385, 0, 16385, 257], averages=True)
        UPDATES[update](rows, average_weight=0.1)
        return rows.written()

    results = in_every_way(run)
    for other in results[1:]:
        assert_all_bit_equal(other, results[0])


@each_backend
@each_update
def test_what_stands_beside_wider_parameters_is_not_used(backend, update):
    kinds = [torch.float32, torch.float64, torch.complex64]
    for dtype in kinds:
        rows, others = (make_rows(backend, [257, 16385], dtype) for _ in range(2))
        rows.masters = [torch.full_like(p, float("nan")) for p in rows.params]
        UPDATES[update](rows)
        UPDATES[update](others)
        assert all(ops.real_view(m).isnan().any() for m in rows.masters)
        rows.masters = None
        assert_all_bit_equal(rows.written(), others.written())


@each_backend
@each_half
def test_steps_that_the_dtype_would_lose_are_kept(backend, dtype):
    rows = make_rows(backend, [300], dtype, sums=torch.float32)
    rows.sums[0].fill_(1.0)
    add_masters(rows, [torch.ones(300)])
    for _ in range(256):
        sgd(rows, {**PLAIN_SGD, "lr": 2.0**-18}, coefficient=1.0)
    assert worth(rows)[0].unique().tolist() == [1 - 2.0**-10]
    assert rows.params[0].unique().tolist() == [1 - 2.0**-10 if dtype == torch.float16 else 1.0]


@each_backend
def test_a_bf16_master_that_passes_the_largest_bf16_comes_back(backend):
    rows = make_rows(backend, [5], torch.bfloat16, sums=torch.float32)
    largest = torch.finfo(torch.float32).max
    add_masters(rows, [torch.full((5,), largest)])
    assert rows.params[0].isinf().all()
    rows.sums[0].fill_(largest / 2)
    sgd(rows, {**PLAIN_SGD, "lr": 1.0}, coefficient=1.0)
    assert worth(rows)[0].unique().tolist() == [largest / 2]
    assert rows.params[0].isfinite().all()
