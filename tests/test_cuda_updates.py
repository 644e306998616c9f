"""The fused CUDA updates, run by the simulator: bit by bit those of the CPU."""

import itertools
import math

import pytest
import torch
from fused import (
    PLAIN_ADAM,
    PLAIN_SGD,
    UPDATES,
    add_averages,
    add_masters,
    exact_params,
    move_average,
)
from fused import adam as run_adam
from fused import sgd as run_sgd
from simulated import COLUMNS, SimulatedBackend, assert_same, gated_update, leave, on, rows_on
from tensors import BACKENDS, HALVES, REALS, clones, dtype_name
from tolerance import assert_all_bit_equal, assert_close

from stepclock_ext import ops

SIZES = [0, 1, 255, 256, 257, 4095, 4096, 4097, 16383, 16384, 16385, 40_001]
EDGES = [0, 1, 257, 16385]
NUM_ROUNDINGS = 16
KEY = 0xC0FFEE1234567890

ADAM_FLAGS = [
    dict(zip(("decoupled", "amsgrad", "maximize", "weight_decay"), values, strict=True))
    for values in itertools.product((False, True), (False, True), (False, True), (0.0, 0.3))
]
SGD_FLAGS = [
    dict(
        zip(
            ("momentum", "dampening", "nesterov", "weight_decay", "maximize"),
            (*momenta, decay, maximize),
            strict=True,
        ),
        lr=0.1,
    )
    for momenta, decay, maximize in itertools.product(
        [(0.0, 0.0, False), (0.9, 0.5, False), (0.9, 0.0, True)], (0.0, 0.3), (False, True)
    )
]
KINDS = [  # parameters, sums, states
    *((dtype, dtype, dtype) for dtype in REALS),
    *((half, torch.float32, torch.float32) for half in HALVES),
    *((half, torch.float32, half) for half in HALVES),
    (torch.bfloat16, torch.bfloat16, torch.float16),
    (torch.float32, torch.float32, torch.bfloat16),
]

needs_cpu = pytest.mark.skipif("cpu" not in BACKENDS, reason="the kernels were not built")
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda k: "-".join(map(dtype_name, k)))
each_half = pytest.mark.parametrize("dtype", HALVES, ids=dtype_name)
each_alignment = pytest.mark.parametrize("unaligned", [False, True], ids=["aligned", "unaligned"])


@pytest.fixture(scope="module")
def loaded():
    return SimulatedBackend()


@pytest.fixture
def backend(loaded):
    """The simulated kernels, in the plain order."""
    yield loaded
    loaded.set_order()
    loaded.alter = leave


def flag_names(flags):
    return "-".join(f"{name}={value}" for name, value in flags.items() if value) or "plain"


@needs_cpu
@each_kind
@each_alignment
@pytest.mark.parametrize("update", UPDATES)
def test_tensors_of_every_size_are_updated_to_their_last_element(backend, kind, unaligned, update):
    assert_same(backend, SIZES, kind, UPDATES[update], unaligned=unaligned)


@needs_cpu
@pytest.mark.parametrize("column", COLUMNS)
def test_one_column_that_is_not_aligned_is_noticed_among_those_that_are(backend, column):
    def amsgrad(rows):
        run_adam(rows, {**PLAIN_ADAM, "amsgrad": True}, average_weight=0.1)

    for kind in (KINDS[4], KINDS[5]):
        options = dict(masters=True, averages=True, misaligned=column)
        for update in (amsgrad, *UPDATES.values()):
            assert_same(backend, [40_001], kind, update, **options)


@needs_cpu
@pytest.mark.parametrize("flags", ADAM_FLAGS, ids=flag_names)
def test_every_flag_of_adam_gives_the_bits_of_the_cpu(backend, flags):
    for kind in KINDS:
        unaligned = flags["maximize"]
        assert_same(backend, EDGES, kind, lambda r: run_adam(r, flags), unaligned=unaligned)


@needs_cpu
@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
@pytest.mark.parametrize("flags", SGD_FLAGS, ids=flag_names)
def test_every_flag_of_sgd_gives_the_bits_of_the_cpu(backend, flags, first):
    for kind in KINDS:
        assert_same(backend, EDGES, kind, lambda r: run_sgd(r, flags, first=first))


@each_kind
@pytest.mark.parametrize("update", UPDATES)
def test_an_update_is_its_specification(backend, kind, update):
    rows = [rows_on(b, EDGES, kind) for b in (backend, "reference")]
    for each in rows:
        UPDATES[update](each)
    for got, want in zip(rows[0].written(), rows[1].written(), strict=True):
        assert_close(got, want, num_roundings=NUM_ROUNDINGS)


def test_the_first_momentum_is_not_read(backend):
    rows = rows_on(backend, [257], KINDS[0])
    rows.buffers[0].fill_(math.nan)
    run_sgd(rows, {**PLAIN_SGD, "momentum": 0.9}, first=True)
    assert all(t.isfinite().all() for t in (*rows.params, *rows.buffers))


@needs_cpu
@each_half
@each_alignment
@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize("update", UPDATES)
def test_masters_move_with_their_averages(backend, dtype, unaligned, averages, update):
    for state in (torch.float32, dtype):
        kind = (dtype, torch.float32, state)
        options = dict(masters=True, averages=averages, unaligned=unaligned)
        along = dict(average_weight=0.1, rounding_key=KEY)  # masters leave nothing to round
        assert_same(backend, SIZES, kind, UPDATES[update], companions=along, **options)


@needs_cpu
@each_kind
@each_alignment
@pytest.mark.parametrize("update", UPDATES)
def test_averages_move_with_the_parameters(backend, kind, unaligned, update):
    options = dict(averages=True, unaligned=unaligned, companions={"average_weight": 0.1})
    assert_same(backend, EDGES, kind, UPDATES[update], **options)


@needs_cpu
@each_kind
@pytest.mark.parametrize("masters", [False, True])
def test_averages_move_alone(backend, kind, masters):
    options = dict(averages=True, masters=masters, companions={"average_weight": 0.1})
    rows = assert_same(backend, SIZES, kind, move_average, **options)
    for average in rows.averages:
        average.fill_(-math.inf)
    for param in rows.params:
        param.fill_(-math.inf)
    if not masters:
        move_average(rows, average_weight=0.1)
        assert all((average == -math.inf).all() for average in rows.averages)


@each_half
@each_alignment
@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize("other", BACKENDS)
def test_rounding_takes_the_random_bits_of_the_specification(
    backend, dtype, unaligned, averages, other
):
    """SGD alone: Adam's arithmetic in plain PyTorch rounds otherwise."""
    kind = (dtype, torch.float32, torch.float32)
    options = dict(averages=averages, unaligned=unaligned)
    along = dict(rounding_key=KEY, average_weight=0.1)
    for update in UPDATES if other == "cpu" else ["sgd"]:
        assert_same(backend, SIZES, kind, UPDATES[update], other=other, companions=along, **options)


@each_half
def test_chunks_of_one_size_are_rounded_by_keys_of_their_own(backend, dtype):
    rows = rows_on(backend, [2 * 16384], (dtype, torch.float32, torch.float32))
    rows.params[0].fill_(1.0)
    rows.sums[0].fill_(torch.finfo(dtype).eps / 3)
    run_sgd(rows, {**PLAIN_SGD, "lr": 1.0}, coefficient=1.0, rounding_key=KEY)
    halves = rows.params[0].split(16384)
    assert set(rows.params[0].unique().tolist()) == {1.0, 1.0 - torch.finfo(dtype).eps / 2}
    assert 0.2 < (halves[0] != halves[1]).double().mean().item() < 0.7


@needs_cpu
def test_rows_of_every_dtype_share_a_call(backend):
    kinds = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.bfloat16]
    results = []
    for name in ("cpu", backend):
        parts = [rows_on("cpu", [16385], (kind, kind, kind)) for kind in kinds]
        rows = parts[0]
        for part in parts[1:]:
            rows.params += part.params
            rows.sums += part.sums
            rows.steps += part.steps
            rows.buffers += part.buffers
            for column, more in zip(rows.moments, part.moments, strict=True):
                column += more
        layout = ops.Layout.of(ops.make_backend("cpu"), rows.params)
        rows.layout = layout if name == "cpu" else on(backend, layout)
        add_masters(rows, exact_params(rows.params))
        add_averages(rows)
        for update in UPDATES.values():
            update(rows, average_weight=0.1, rounding_key=KEY)
        results.append(rows.written())
    assert_all_bit_equal(*results)


@each_alignment
@pytest.mark.parametrize("norm", [math.nan, math.inf])
@pytest.mark.parametrize("update", ["adam", "sgd", "average"])
def test_a_gated_update_of_a_bad_norm_changes_nothing(backend, norm, update, unaligned):
    for kind, masters in [(KINDS[0], False), (KINDS[4], True), (KINDS[4], False)]:
        rows = rows_on(backend, EDGES, kind, masters=masters, averages=True, unaligned=unaligned)
        before = clones(rows.written())
        for is_gated in (True, False):
            gated_update(rows, update, norm, is_gated=is_gated)
            same = all(map(torch.equal, rows.written(), before))
            assert same == is_gated
        gated_update(rows, update, 3.0, is_gated=True)


@needs_cpu
def test_a_nan_or_an_infinity_stays_with_its_element(backend):
    flags = {**PLAIN_ADAM, "amsgrad": True}
    for kind in KINDS:
        rows = [rows_on(b, [4097], kind) for b in (backend, "cpu")]
        for each in rows:
            each.sums[0][[0, 100, 4096]] = torch.tensor([math.nan, math.inf, -math.inf]).to(kind[1])
            each.params[0][7] = -math.inf
            run_adam(each, flags)
        assert_all_bit_equal(rows[0].written(), rows[1].written())
        assert rows[0].params[0].isfinite().sum() == 4097 - 4


@needs_cpu
@pytest.mark.parametrize("order", [(1, 0), (0, 1), (1, 1), (7, 7)], ids=str)
def test_no_order_of_blocks_and_threads_changes_a_bit(backend, order):
    backend.set_order(blocks=order[0], threads=order[1])
    options = dict(averages=True, companions=dict(rounding_key=KEY, average_weight=0.1))
    for update in UPDATES.values():
        assert_same(backend, [40_001, 257], KINDS[4], update, **options)


@needs_cpu
def test_elements_beyond_the_reach_of_32_bits_are_found(backend):
    """Rows of 2**32 elements of which the last 40,001 are there."""
    beyond = 2**32

    def move_away(chunks, num_elements, addresses):
        chunks[:, 1] += beyond
        num_elements += beyond
        sizes = torch.tensor([2, 0, 4, 4, 4, 4, 4, 0, 2, 4])  # of each column's elements
        addresses -= torch.where(addresses != 0, beyond * sizes[:, None], 0)

    backend.alter = move_away
    along = dict(average_weight=0.1)
    for update in UPDATES.values():
        assert_same(
            backend, [40_001], KINDS[4], update, masters=True, averages=True, companions=along
        )


@needs_cpu
def test_an_update_pairs_elements_whatever_the_strides(backend):
    def like(tensor):
        return tensor.reshape(2, 3, 40, 110).to(memory_format=torch.channels_last)

    for kind in (KINDS[0], KINDS[4]):
        assert_same(backend, [2 * 3 * 40 * 110], kind, run_adam, like=like)
