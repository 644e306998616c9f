"""The fused updates: Adam, AdamW and SGD, each flag of each, against torch.optim in fp64."""

import itertools
import math

import pytest
import torch
from tensors import (
    BACKENDS,
    DTYPES,
    HALVES,
    REALS,
    SIZES,
    clones,
    coefficient_stats,
    dtype_name,
    interleaved_sizes,
    layout_of,
    random_list,
    square_list,
)
from tolerance import assert_bit_equal, assert_close

from stepclock_ext import ops

each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
each_real = pytest.mark.parametrize("dtype", REALS, ids=dtype_name)
COEFFICIENT = 0.37
# Products and sums that an element goes through in one update.
NUM_ROUNDINGS = 16
# One size past each edge; `SIZES` itself is tried with one set of flags.
EDGES = [0, 1, 255, 257, 1025, 16385]

ADAM_FLAGS = [
    dict(zip(("decoupled", "amsgrad", "maximize", "weight_decay"), values, strict=True))
    for values in itertools.product((False, True), (False, True), (False, True), (0.0, 0.3))
]
MOMENTA = [(0.0, 0.0, False), (0.9, 0.0, False), (0.9, 0.5, False), (0.9, 0.0, True)]
SGD_FLAGS = [
    dict(
        momentum=momentum,
        dampening=dampening,
        nesterov=nesterov,
        weight_decay=weight_decay,
        maximize=maximize,
    )
    for (momentum, dampening, nesterov), weight_decay, maximize in itertools.product(
        MOMENTA, (0.0, 0.3), (False, True)
    )
]


def flag_names(flags):
    return "-".join(f"{name}={value}" for name, value in flags.items() if value) or "plain"


def adam_scalars(flags):
    return ops.AdamScalars(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-3, **flags)


def adam_lists(sizes, dtype, *, steps, unaligned=(False,) * 5):
    """Parameters, first, second and largest second moments, gradients; and the steps."""
    makers = (random_list, random_list, square_list, square_list, random_list)
    params, exp_avgs, exp_avg_sqs, maxima, grads = (
        make(sizes, dtype, seed=column, unaligned=unaligned[column])
        for column, make in enumerate(makers)
    )
    counters = [torch.tensor(float(steps + row % 3)) for row in range(len(sizes))]
    return [params, exp_avgs, exp_avg_sqs, maxima, grads], counters


def run_adam(backend, lists, counters, flags, *, coefficient=COEFFICIENT):
    params, exp_avgs, exp_avg_sqs, maxima, grads = lists
    states = ops.AdamStates(counters, exp_avgs, exp_avg_sqs, maxima if flags["amsgrad"] else None)
    layout = layout_of(backend, params)
    stats = coefficient_stats(coefficient)
    ops.adam_(params, states, grads, stats, layout, adam_scalars(flags))


def widened(tensors):
    """fp64 copies."""
    wide = {True: torch.complex128, False: torch.float64}
    return [t.to(wide[t.is_complex()], copy=True) for t in tensors]


def adam_by_torch(lists, counters, flags):
    """What ``torch.optim`` makes of the same numbers in fp64."""
    params, *moments, grads = (widened(tensors) for tensors in lists)
    options = {name: value for name, value in flags.items() if name != "decoupled"}
    cls = torch.optim.AdamW if flags["decoupled"] else torch.optim.Adam
    optimizer = cls(params, lr=0.1, betas=(0.9, 0.99), eps=1e-3, foreach=False, **options)
    keys = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 2 + flags["amsgrad"]]
    for row, (param, grad) in enumerate(zip(params, grads, strict=True)):
        param.grad = grad * COEFFICIENT
        values = {key: moments[column][row] for column, key in enumerate(keys)}
        optimizer.state[param] = {"step": counters[row].clone(), **values}
    optimizer.step()
    return [params, *moments]


def run_sgd(backend, params, buffers, grads, flags, *, first=False, coefficient=COEFFICIENT):
    scalars = ops.SgdScalars(lr=0.1, first=first, **flags)
    stats = coefficient_stats(coefficient)
    buffers = buffers if flags["momentum"] else None
    ops.sgd_(params, buffers, grads, stats, layout_of(backend, params), scalars)


def sgd_by_torch(params, buffers, grads, flags, *, first):
    """What ``torch.optim.SGD`` makes of the same numbers in fp64; the buffers as well."""
    params, buffers, grads = widened(params), widened(buffers), widened(grads)
    optimizer = torch.optim.SGD(params, lr=0.1, foreach=False, **flags)
    for param, buffer, grad in zip(params, buffers, grads, strict=True):
        param.grad = grad * COEFFICIENT
        optimizer.state[param] = {"momentum_buffer": None if first else buffer}
    optimizer.step()
    if flags["momentum"]:
        buffers = [optimizer.state[p]["momentum_buffer"] for p in params]
    return params, buffers


def assert_lists_close(actual, expected):
    for got, want in zip(itertools.chain(*actual), itertools.chain(*expected), strict=True):
        got, want = ops.real_view(got), ops.real_view(want)
        assert_close(got, want, num_roundings=NUM_ROUNDINGS)


@each_backend
@each_dtype
@pytest.mark.parametrize("flags", ADAM_FLAGS, ids=flag_names)
def test_adam_is_torchs_adam(backend, dtype, flags):
    unaligned = (True, False, True, False, flags["maximize"])
    lists, counters = adam_lists(EDGES, dtype, steps=700, unaligned=unaligned)
    expected = adam_by_torch(lists, counters, flags)
    before = clones(lists[4])
    steps_before = [counter.item() for counter in counters]
    run_adam(backend, lists, counters, flags)
    assert_lists_close(lists[:4], expected)
    assert [counter.item() for counter in counters] == [step + 1 for step in steps_before]
    for grad, old in zip(lists[4], before, strict=True):
        assert_bit_equal(grad, old)


@each_backend
@each_dtype
@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
@pytest.mark.parametrize("flags", SGD_FLAGS, ids=flag_names)
def test_sgd_is_torchs_sgd(backend, dtype, first, flags):
    params, buffers, grads = (
        random_list(EDGES, dtype, seed=seed, unaligned=first) for seed in range(3)
    )
    if first:  # what a new buffer holds is nobody's business
        for buffer in buffers:
            buffer.fill_(math.nan)
    expected, moved = sgd_by_torch(params, buffers, grads, flags, first=first)
    before = clones(grads)
    run_sgd(backend, params, buffers, grads, flags, first=first)
    assert_lists_close([params], [expected])
    assert_lists_close([buffers], [moved])
    for grad, old in zip(grads, before, strict=True):
        assert_bit_equal(grad, old)


@each_backend
@each_dtype
def test_tensors_of_every_size_are_updated_to_their_last_element(backend, dtype):
    lists, counters = adam_lists(SIZES, dtype, steps=3)
    expected = adam_by_torch(lists, counters, ADAM_FLAGS[-1])
    run_adam(backend, lists, counters, ADAM_FLAGS[-1])
    assert_lists_close(lists[:4], expected)
    params, buffers, grads = (random_list(SIZES, dtype, seed=seed) for seed in range(3))
    expected, moved = sgd_by_torch(params, buffers, grads, SGD_FLAGS[-1], first=False)
    run_sgd(backend, params, buffers, grads, SGD_FLAGS[-1])
    assert_lists_close([params, buffers], [expected, moved])


@each_backend
@each_dtype
def test_empty_tensors_between_others_shift_no_update(backend, dtype):
    sizes = interleaved_sizes()
    lists, counters = adam_lists(sizes, dtype, steps=0)
    expected = adam_by_torch(lists, counters, ADAM_FLAGS[-1])
    run_adam(backend, lists, counters, ADAM_FLAGS[-1])
    assert_lists_close(lists[:4], expected)
    assert [counter.item() for counter in counters] == [1 + row % 3 for row in range(len(sizes))]


@each_backend
@each_dtype
def test_an_update_pairs_elements_whatever_the_strides(backend, dtype):
    flat, counters = adam_lists([2 * 3 * 40 * 110, 7 * 5], dtype, steps=0)
    lists = [
        [t.reshape(2, 3, 40, 110).to(memory_format=torch.channels_last), u.reshape(7, 5).t()]
        for t, u in flat
    ]
    expected = adam_by_torch(lists, counters, ADAM_FLAGS[-1])
    run_adam(backend, lists, counters, ADAM_FLAGS[-1])
    assert_lists_close(lists[:4], expected)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the kernels were not built")
@each_dtype
@pytest.mark.parametrize("flags", ADAM_FLAGS, ids=flag_names)
def test_adams_kernel_is_its_specification(dtype, flags):
    lists, counters = adam_lists([257, 16385], dtype, steps=5)
    others, other_counters = [clones(tensors) for tensors in lists], clones(counters)
    run_adam("cpu", lists, counters, flags)
    run_adam("reference", others, other_counters, flags)
    assert_lists_close(lists, others)


@each_backend
@each_real
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_a_parameter_of_minus_infinity_stays_in_adam_without_decay(
    backend, dtype, decoupled, amsgrad
):
    flags = dict(decoupled=decoupled, amsgrad=amsgrad, maximize=False, weight_decay=0.0)
    lists, counters = adam_lists([300], dtype, steps=0)
    lists[0][0][::3] = -math.inf
    lists[4][0][::6] = 0.0
    run_adam(backend, lists, counters, flags)
    assert (lists[0][0][::3] == -math.inf).all()
    assert lists[0][0].isinf().sum() == 100
    assert all(t.isfinite().all() for column in lists[1:] for t in column)


@each_backend
@each_real
@pytest.mark.parametrize("flags", SGD_FLAGS, ids=flag_names)
@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
def test_a_parameter_of_minus_infinity_stays_in_sgd_without_decay(backend, dtype, flags, first):
    (param,), (buffer,), (grad,) = (random_list([300], dtype, seed=seed) for seed in range(3))
    param[::3] = -math.inf
    grad[::6] = 0.0
    run_sgd(backend, [param], [buffer], [grad], {**flags, "weight_decay": 0.0}, first=first)
    assert (param[::3] == -math.inf).all()
    assert param.isinf().sum() == 100
    assert buffer.isfinite().all()


@each_backend
@each_real
def test_amsgrads_largest_moment_keeps_a_nan_that_either_side_brings(backend, dtype):
    lists, counters = adam_lists([300], dtype, steps=0)
    lists[3][0][7] = math.nan
    lists[4][0][299] = math.nan
    run_adam(backend, lists, counters, ADAM_FLAGS[-1])
    assert lists[3][0].isnan().nonzero().flatten().tolist() == [7, 299]
    assert lists[0][0].isnan().nonzero().flatten().tolist() == [7, 299]


@each_backend
@pytest.mark.parametrize("dtype", HALVES, ids=dtype_name)
def test_a_16_bit_update_is_computed_in_fp32_and_rounded_once(backend, dtype):
    params, grads = random_list([16385], dtype, seed=1), random_list([16385], dtype, seed=2)
    factor, lr = torch.tensor(COEFFICIENT), torch.tensor(0.1)
    expected = (params[0].float() - lr * (grads[0].float() * factor)).to(dtype)
    run_sgd(backend, params, None, grads, SGD_FLAGS[0])
    assert_bit_equal(params[0], expected)
