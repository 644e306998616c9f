"""Updates of parameters, sums and states of unlike dtypes: computed in fp32, each rounded once."""

import itertools

import pytest
import torch
from fused import ADAM, PLAIN_SGD, UPDATES, adam, in_every_way, make_rows, sgd
from tensors import BACKENDS, HALVES, clones, dtype_name
from test_update_kernels import ADAM_FLAGS, NUM_ROUNDINGS, SGD_FLAGS, widened
from tolerance import assert_all_bit_equal, assert_bit_equal, assert_close, limit

from stepclock_ext import ops

each_backend = pytest.mark.parametrize("backend", BACKENDS)
needs_cpu = pytest.mark.skipif("cpu" not in BACKENDS, reason="the kernels were not built")
# Parameters, sums and state: whatever may stand beside each other and is not one dtype.
DTYPES = [
    (dtype, sums, state)
    for dtype in HALVES
    for sums, state in itertools.product([dtype, torch.float32], [*HALVES, torch.float32])
    if (sums, state) != (dtype, dtype)
] + [(torch.float32, torch.float32, state) for state in HALVES]
each_dtypes = pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(map(dtype_name, d)))
# Around a kernel's block and a chunk; one element, none.
EDGES = [0, 1, 255, 1024, 1025, 16385]


def rows_of(backend, dtypes, sizes=EDGES, **options):
    dtype, sums, state = dtypes
    return make_rows(backend, sizes, dtype, sums=sums, state=state, **options)


def adam_in_fp64(rows, flags, coefficient):
    """What ``torch.optim`` makes of the same numbers: parameters and moments."""
    params, sums = widened(rows.params), widened(rows.sums)
    moments = [widened(tensors) for tensors in rows.moments]
    options = {name: value for name, value in flags.items() if name != "decoupled"}
    cls = torch.optim.AdamW if flags["decoupled"] else torch.optim.Adam
    betas = (ADAM["beta1"], ADAM["beta2"])
    optimizer = cls(params, lr=ADAM["lr"], betas=betas, eps=ADAM["eps"], foreach=False, **options)
    keys = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 2 + flags["amsgrad"]]
    for row, param in enumerate(params):
        param.grad = sums[row] * coefficient
        values = {key: moments[column][row] for column, key in enumerate(keys)}
        optimizer.state[param] = {"step": rows.steps[row].clone(), **values}
    optimizer.step()
    return [*params, *(t for tensors in moments for t in tensors)]


def sgd_in_fp64(rows, flags, coefficient):
    """What ``torch.optim.SGD`` makes of the same numbers: parameters and buffers."""
    params, sums, buffers = (widened(ts) for ts in (rows.params, rows.sums, rows.buffers))
    optimizer = torch.optim.SGD(params, foreach=False, **flags)
    for param, total, buffer in zip(params, sums, buffers, strict=True):
        param.grad = total * coefficient
        optimizer.state[param] = {"momentum_buffer": buffer}
    optimizer.step()
    if flags["momentum"]:
        buffers = [optimizer.state[p]["momentum_buffer"] for p in params]
    return [*params, *buffers]


def assert_rounded_once(actual, expected):
    """Each element is some fp32 number within the limit of `expected`, rounded to nearest."""
    for got, want in zip(actual, expected, strict=True):
        if got.numel() == 0:
            continue
        magnitude = want.abs().max().item()
        allowed = limit(torch.float32, num_roundings=NUM_ROUNDINGS, magnitude=magnitude)
        low, high = ((want + shift).float().to(got.dtype) for shift in (-allowed, allowed))
        wrong = ~((low <= got) & (got <= high))
        assert not wrong.any(), (
            f"{int(wrong.sum())} of {got.numel()} values of {got.dtype}: got {got[wrong][:3]}, "
            f"expected {want[wrong][:3]}"
        )


@each_backend
@each_dtypes
def test_adam_is_torchs_adam_of_the_same_numbers(backend, dtypes):
    for flags in ADAM_FLAGS:
        rows = rows_of(backend, dtypes, unaligned=flags["maximize"])
        expected = adam_in_fp64(rows, flags, coefficient=0.37)
        sums = clones(rows.sums)
        adam(rows, flags)
        assert_rounded_once([*rows.params, *itertools.chain(*rows.moments)], expected)
        assert_all_bit_equal(rows.sums, sums)


@each_backend
@each_dtypes
def test_sgd_is_torchs_sgd_of_the_same_numbers(backend, dtypes):
    for flags in SGD_FLAGS:
        flags = {**flags, "lr": PLAIN_SGD["lr"]}
        rows = rows_of(backend, dtypes, unaligned=flags["maximize"])
        expected = sgd_in_fp64(rows, flags, coefficient=0.37)
        sums = clones(rows.sums)
        sgd(rows, flags)
        assert_rounded_once([*rows.params, *rows.buffers], expected)
        assert_all_bit_equal(rows.sums, sums)


@needs_cpu
@each_dtypes
@pytest.mark.parametrize("first", [False, True])
def test_sgds_kernel_is_its_specification_to_the_bit(dtypes, first):
    for flags in SGD_FLAGS:
        rows, others = (rows_of(backend, dtypes) for backend in ("cpu", "reference"))
        for each in (rows, others):
            if first and flags["momentum"]:
                for buffer in each.buffers:
                    buffer.fill_(float("nan"))  # what a new buffer holds is nobody's business
            sgd(each, {**flags, "lr": 0.1}, first=first)
        assert_all_bit_equal(rows.written(), others.written())


@needs_cpu
@each_dtypes
def test_adams_kernel_is_its_specification(dtypes):
    for flags in ADAM_FLAGS:
        rows, others = (rows_of(backend, dtypes) for backend in ("cpu", "reference"))
        adam(rows, flags)
        adam(others, flags)
        for got, want in zip(rows.written(), others.written(), strict=True):
            assert_close(got, want, num_roundings=NUM_ROUNDINGS)


@each_backend
@each_dtypes
@pytest.mark.parametrize("update", UPDATES)
def test_an_update_pairs_elements_of_unlike_dtypes_whatever_the_strides(backend, dtypes, update):
    size = [2 * 3 * 40 * 110]

    def strided(tensor):
        return tensor.reshape(2, 3, 40, 110).to(memory_format=torch.channels_last)

    rows, others = rows_of(backend, dtypes, size, like=strided), rows_of(backend, dtypes, size)
    UPDATES[update](rows)
    UPDATES[update](others)
    for got, want in zip(rows.written(), others.written(), strict=True):
        assert_bit_equal(got.reshape(want.shape), want)


@each_backend
@pytest.mark.parametrize("update", ["adam", "momentum"])
def test_states_of_another_dtype_may_take_their_place_between_updates(backend, update):
    rows = rows_of(backend, (torch.bfloat16, torch.float32, torch.bfloat16))
    for state in (torch.float32, torch.float16, torch.bfloat16):
        UPDATES[update](rows)
        other = rows_of(backend, (torch.bfloat16, torch.float32, state))
        rows.params, rows.steps = clones(other.params), clones(other.steps)
        rows.moments = [clones(tensors) for tensors in other.moments]
        rows.buffers = clones(other.buffers)
        rows.layout.adopt_state_dtypes(rows.moments[0])
        UPDATES[update](rows)
        UPDATES[update](other)
        assert_all_bit_equal(rows.written(), other.written())


@needs_cpu
@pytest.mark.parametrize("update", UPDATES)
def test_threads_and_instruction_sets_update_alike(update):
    def run():
        every = [rows_of("cpu", dtypes, [16385, 0, 16385, 257]) for dtypes in DTYPES]
        for rows in every:
            UPDATES[update](rows)
        return [t for rows in every for t in rows.written()]

    results = in_every_way(run)
    for other in results[1:]:
        assert_all_bit_equal(other, results[0])


@each_backend
@pytest.mark.parametrize("update", UPDATES)
def test_rows_of_unlike_dtypes_may_share_an_update(backend, update):
    kinds = [torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.complex64]
    apart = []
    for dtype in kinds:
        sums = torch.float32 if dtype in HALVES else dtype
        apart.append(make_rows(backend, [16385], dtype, sums=sums, state=sums))
    lists = [[rows.params[0] for rows in apart], [rows.sums[0] for rows in apart]]
    moments = [[rows.moments[column][0] for rows in apart] for column in range(3)]
    buffers, steps = [rows.buffers[0] for rows in apart], [rows.steps[0] for rows in apart]
    together = make_rows(backend, [1], torch.float32)
    made = ops.make_backend(backend)
    together.layout = ops.Layout.of(made, lists[0], accumulate_dtype=torch.float32)
    together.layout.adopt_state_dtypes(moments[0])
    together.params, together.sums = (clones(tensors) for tensors in lists)
    together.moments = [clones(tensors) for tensors in moments]
    together.buffers, together.steps = clones(buffers), clones(steps)
    UPDATES[update](together)
    for row, rows in enumerate(apart):
        UPDATES[update](rows)
        columns = (together.params, *together.moments, together.buffers, together.steps)
        assert_all_bit_equal([column[row] for column in columns], rows.written())
