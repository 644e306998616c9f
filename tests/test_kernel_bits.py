"""Bits that must not depend on the threads, the instruction set, the run or where the norm rode."""

import pytest
import torch
from tensors import (
    BACKENDS,
    DTYPES,
    clones,
    coefficient_stats,
    dtype_name,
    layout_of,
    random_list,
    square_list,
)
from tolerance import assert_all_bit_equal

from stepclock_ext import ClockedOptimizer, LossScale, ops
from stepclock_ext.accumulator import Accumulator
from stepclock_ext.parameters import ParameterRows

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="the kernels were not built")
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)

SIZES = [16385, 0, 16384, 1, 257]  # four chunks: enough for two threads
TRAINED = [70_001, 0, 1, 257]  # the first is large enough for the norm to ride
ADAM = dict(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8)
SGD = dict(lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.3, maximize=True)


@pytest.fixture
def native():
    """The compiled module; the instruction set in use comes back afterwards."""
    from stepclock_ext import _C

    isa = _C.isa()
    yield _C
    _C.use_isa(isa)


@pytest.fixture
def threads():
    """``torch.set_num_threads``; the number in use comes back afterwards."""
    number = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(number)


def run_every_op(dtype):
    """Every tensor that any op writes."""
    grads = random_list(SIZES, dtype, seed=1)
    layout = layout_of("cpu", grads)
    slots = [ops.make_slots(layout.num_slots) for _ in range(4)]
    stats = ops.make_stats()
    sums, stored, scaled = random_list(SIZES, dtype, seed=2), clones(grads), clones(grads)
    ops.sum_squares_(slots[0], grads, layout)
    ops.max_abs_(slots[1], grads, layout)
    ops.accumulate_(sums, grads, layout, slots=slots[2])
    ops.accumulate_(stored, sums, layout, slots=slots[3], store=True)
    ops.coefficient_(stats, slots[2], layout, divisor=3.0, max_norm=1.0)
    ops.scale_(scaled, stats, layout)
    return [*slots, stats, *sums, *stored, *scaled, *run_updates(dtype, grads, layout)]


def run_updates(dtype, grads, layout):
    """What each variant of the update kernels writes."""
    written, stats = [], coefficient_stats(0.37)
    for decoupled, amsgrad in [(False, False), (False, True), (True, False), (True, True)]:
        params, firsts = random_list(SIZES, dtype, seed=2), random_list(SIZES, dtype, seed=3)
        seconds, maxima = square_list(SIZES, dtype, seed=4), square_list(SIZES, dtype, seed=5)
        steps = [torch.tensor(float(row)) for row in range(len(SIZES))]
        states = ops.AdamStates(steps, firsts, seconds, maxima if amsgrad else None)
        flags = dict(decoupled=decoupled, amsgrad=amsgrad, maximize=amsgrad, weight_decay=0.3)
        ops.adam_(params, states, grads, stats, layout, ops.AdamScalars(**ADAM, **flags))
        written += [*params, *firsts, *seconds, *maxima, *steps]
    for nesterov, first in [(False, False), (True, False), (False, True), (True, True)]:
        params, buffers = random_list(SIZES, dtype, seed=2), random_list(SIZES, dtype, seed=3)
        scalars = ops.SgdScalars(**SGD, nesterov=nesterov, first=first)
        ops.sgd_(params, buffers, grads, stats, layout, scalars)
        written += [*params, *buffers]
    return written


def train(backend="cpu"):
    """Parameters, state and norms of a run of four windows of three micro steps."""
    params = [torch.nn.Parameter(t) for t in random_list(TRAINED, torch.float32)]
    inner = torch.optim.AdamW(params, lr=0.01, amsgrad=True)
    opt = ClockedOptimizer(
        inner,
        gradient_accumulation_steps=3,
        max_grad_norm=1.0,
        loss_scale=LossScale(init_scale=1024.0),
        backend=backend,
    )
    norms = []
    for micro in range(12):
        inputs = random_list(TRAINED, torch.float32, seed=10 + micro)
        opt.backward(sum((p * x).sum() for p, x in zip(params, inputs, strict=True)))
        info = opt.step()
        if info.updated:
            norms += [info.grad_norm, info.clipped_norm]
    state = [t for values in inner.state.values() for t in values.values()]
    return [*params, *state, torch.tensor(norms, dtype=torch.float64)]


@each_dtype
def test_one_thread_and_two_give_the_same_bits(threads, dtype):
    threads(1)
    alone = run_every_op(dtype)
    threads(2)
    assert_all_bit_equal(run_every_op(dtype), alone)


@each_dtype
def test_every_instruction_set_gives_the_same_bits(native, dtype):
    chosen = run_every_op(dtype)
    assert native.available_isas()[-1] == "baseline"
    for isa in native.available_isas():
        native.use_isa(isa)
        assert native.isa() == isa
        assert_all_bit_equal(run_every_op(dtype), chosen)


@each_dtype
def test_every_run_gives_the_same_bits(dtype):
    assert_all_bit_equal(run_every_op(dtype), run_every_op(dtype))


def test_an_unknown_instruction_set_is_refused_and_changes_nothing(native):
    before = native.isa()
    with pytest.raises(ValueError, match="use_isa: cannot use mmx"):
        native.use_isa("mmx")
    assert native.isa() == before


def test_training_has_the_same_bits_on_any_threads_and_instruction_set(native, threads):
    expected = train()
    for isa in native.available_isas():
        native.use_isa(isa)
        for number in (1, 2):
            threads(number)
            assert_all_bit_equal(train(), expected)


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_name)
def test_a_norm_that_rode_has_the_bits_of_one_that_was_read(steps, dtype):
    norms = []
    for rides in (True, False):
        params = [torch.nn.Parameter(t) for t in random_list(TRAINED, dtype)]
        opt = ClockedOptimizer(torch.optim.SGD(params), gradient_accumulation_steps=steps)
        for micro in range(2 * steps):
            inputs = random_list(TRAINED, dtype, seed=10 + micro)
            loss = sum((p * x).sum() for p, x in zip(params, inputs, strict=True))
            if rides:
                opt.backward(loss)
            else:
                loss.backward()
            info = opt.step()
            norms.append((rides, info.grad_norm))
    middle = len(norms) // 2
    assert [norm for _, norm in norms[:middle]] == [norm for _, norm in norms[middle:]]
    assert sum(norm is not None for _, norm in norms) == 4


def test_the_norm_of_a_large_parameter_rides_on_its_last_accumulation():
    params = [torch.nn.Parameter(torch.zeros(size)) for size in (100_003, 5)]
    rows = ParameterRows([{"params": params}], ops.make_backend("cpu"))
    accumulator = Accumulator(rows, str)
    sum(p.sum() for p in params).backward()
    accumulator.hold()
    with accumulator.ride.riding():
        sum(p.sum() for p in params).backward()
    gradients = accumulator.collect()
    assert accumulator.unmeasured(gradients) == (1,)
    assert accumulator.slots[:7].sum().item() == 4 * 100_003
    assert (params[0].grad == 2).all()


def test_a_gradient_changed_after_it_was_measured_is_measured_again():
    param = torch.nn.Parameter(torch.zeros(100_003))
    opt = ClockedOptimizer(torch.optim.SGD([param]), gradient_accumulation_steps=2)
    for micro in range(2):
        opt.backward(param.sum())
        if micro == 1:
            param.grad.zero_()
            param.grad[-1] = 6.0
        info = opt.step()
    assert info.grad_norm == 3.0
