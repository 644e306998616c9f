"""Checks of the Triton kernels that update parameters: run by triton_process.py."""

import itertools
import math

import torch
from fused import (
    LOW_BITS,
    PLAIN_ADAM,
    PLAIN_SGD,
    Rows,
    adam,
    add_averages,
    add_masters,
    every_upper_half,
    exact_params,
    make_rows,
    momentum_sgd,
    move_average,
    sgd,
)
from tensors import DTYPES, HALVES, clones, random_list
from tolerance import assert_all_bit_equal, assert_bit_equal
from triton_process import EDGES, SIZES, compare_update, on

from stepclock_ext import ops

KEY = ops.update_key(seed=7, update=3)
FAR = 2**33  # elements before the first one of a row


def transposed(tensor):
    """The same elements as a transposed matrix, where they are three times as many as some."""
    size = tensor.numel()
    return tensor.view(3, -1).t() if size and size % 3 == 0 else tensor


def every_flag_of_adam(backend):
    flags = itertools.product((False, True), (False, True), (False, True), (0.0, 0.3))
    for (decoupled, amsgrad, maximize, decay), dtype in zip(flags, itertools.cycle(DTYPES)):
        named = dict(decoupled=decoupled, amsgrad=amsgrad, maximize=maximize, weight_decay=decay)
        rows = make_rows("reference", [257, 0, 2049], dtype, unaligned=maximize)
        compare_update(backend, rows, adam, named)


def every_flag_of_sgd(backend):
    momenta = [(0.0, 0.0, False), (0.9, 0.0, False), (0.9, 0.5, False), (0.9, 0.0, True)]
    kinds = itertools.product(momenta, (0.0, 0.3), (False, True), (False, True))
    for (kind, decay, maximize, first), dtype in zip(kinds, itertools.cycle(DTYPES)):
        momentum, dampening, nesterov = kind
        named = {**PLAIN_SGD, "momentum": momentum, "dampening": dampening, "nesterov": nesterov}
        named |= {"weight_decay": decay, "maximize": maximize}
        rows = make_rows("reference", [257, 0, 2049], dtype, unaligned=first)
        compare_update(backend, rows, sgd, named, first=first)


def updates_of_every_size_and_dtype(backend):
    flags = {**PLAIN_ADAM, "amsgrad": True, "weight_decay": 0.3}
    for dtype in DTYPES:
        sizes = SIZES if dtype in (torch.float32, torch.bfloat16) else EDGES[:-1]
        rows = make_rows("reference", sizes, dtype, unaligned=dtype == torch.bfloat16)
        compare_update(backend, rows, adam, flags)
        rows = make_rows("reference", [3 * 701, 5, 0, 9], dtype, like=transposed)
        compare_update(backend, rows, momentum_sgd)
    for dtype, state in itertools.product(HALVES, (torch.bfloat16, torch.float16, torch.float32)):
        rows = make_rows("reference", [1, 2049], dtype, sums=torch.float32, state=state)
        compare_update(backend, rows, adam, flags)


def masters_and_averages(backend):
    for dtype in (*HALVES, torch.float64):
        wide = torch.float32 if dtype in HALVES else dtype
        unaligned = dtype == torch.float16
        rows = make_rows("reference", EDGES, dtype, sums=wide, state=wide, unaligned=unaligned)
        add_averages(rows)
        compare_update(backend, rows, momentum_sgd, average_weight=0.1)
        if dtype in HALVES:
            add_masters(rows, exact_params(rows.params))
        compare_update(backend, rows, adam, average_weight=0.1)
        for params in (rows.params, rows.averages):
            params[-1][5] = -math.inf
        compare_update(backend, rows, move_average, average_weight=0.1, exact=True)


def upper_halves(*low_bits):
    """fp32 numbers of every upper half with these lower ones."""
    rows = every_upper_half().view(len(LOW_BITS), -1)
    return rows[[LOW_BITS.index(bits) for bits in low_bits]].flatten()


def remainders_of_every_exponent(backend):
    values = upper_halves(0, 0x7FFF, 0x8000, 0xFFFF)
    half, remainder = ops.split(values)
    layout = ops.Layout.of(backend, [half], accumulate_dtype=torch.float32)
    rows = Rows(layout, [half.clone()], [torch.zeros_like(values)], [[], [], []], [], [])
    rows.masters = [remainder.clone()]
    sgd(rows)  # with sums of zero
    assert_bit_equal(rows.params[0], half)
    assert_bit_equal(rows.masters[0][~values.isnan()], remainder[~values.isnan()])


def stochastic_bits(backend):
    lists = [random_list(SIZES, torch.float32, seed=5), [upper_halves(0x3A7C)]]
    for dtype, values in itertools.product(HALVES, lists):
        params = [torch.zeros_like(x, dtype=dtype) for x in values]
        layout = ops.Layout.of(backend, params, accumulate_dtype=torch.float32)
        rows = Rows(layout, params, values, [[], [], []], [], [])
        named = {**PLAIN_SGD, "lr": 1.0}
        options = dict(coefficient=-1.0, rounding_key=KEY)  # 0 - 1 * (-1 * x)
        compare_update(backend, rows, sgd, named, exact=True, **options)


def gated(rows, stats, update):
    """One gated update."""
    along = ops.Companions(averages=rows.averages, average_weight=0.1, is_gated=True)
    flags, layout = {"lr": 0.1, "weight_decay": 0.1, "maximize": False}, rows.layout
    if update == "adam":
        states = ops.AdamStates(rows.steps, rows.moments[0], rows.moments[1], None)
        flags |= dict(beta1=0.9, beta2=0.99, eps=1e-8, decoupled=True, amsgrad=False)
        numbers = ops.AdamScalars(**flags)
        ops.adam_(rows.params, states, rows.sums, stats, layout, numbers, along)
    elif update == "sgd":
        numbers = ops.SgdScalars(momentum=0.9, dampening=0.0, nesterov=True, first=False, **flags)
        ops.sgd_(rows.params, rows.buffers, rows.sums, stats, layout, numbers, along)
    else:
        ops.move_average_(rows.params, stats, layout, along)


def a_gate_is_shut_where_the_norm_is_not_finite(backend):
    cases = itertools.product((math.nan, math.inf, -math.inf), ("adam", "sgd", "average"))
    for norm, update in cases:
        rows = make_rows("reference", [3, 2049], torch.float32)
        add_averages(rows)
        shut, opened = on(backend, rows), on(backend, rows)
        gated(shut, torch.tensor([norm, 0.5, 1.0], dtype=torch.float64), update)
        assert_all_bit_equal(shut.written(), rows.written())
        gated(opened, torch.tensor([1.0, 0.5, 1.0], dtype=torch.float64), update)
        written = [rows.averages, *([rows.params] if update != "average" else [])]
        moved = [opened.averages, *([opened.params] if update != "average" else [])]
        for old, new in zip(itertools.chain(*written), itertools.chain(*moved), strict=True):
            assert (old != new).any()
        assert (opened.steps[0] != rows.steps[0]) == (update == "adam")


def with_guards(tensors, value=7.0):
    """Copies that lie 64 elements apart in one block of memory; and what lies between them."""
    gap = 64
    sizes = [t.numel() for t in tensors]
    memory = torch.full((sum(sizes) + gap * (len(sizes) + 1),), value, dtype=tensors[0].dtype)
    guarded, first, between = [], gap, torch.ones(memory.numel(), dtype=torch.bool)
    for tensor, size in zip(tensors, sizes, strict=True):
        guarded.append(memory[first : first + size].copy_(tensor))
        between[first : first + size] = False
        first += size + gap
    return guarded, lambda: memory[between]


def nothing_beyond_a_tensor_is_read_or_written(backend):
    for dtype in (torch.float32, torch.bfloat16):
        rows = on(backend, make_rows("reference", [1, 255, 2049, 4097], dtype))
        expected = on(rows.layout.backend, rows)
        lists = [rows.params, rows.sums, *rows.moments[:2], rows.buffers]
        guarded = [with_guards(tensors) for tensors in lists]
        rows.params, rows.sums, rows.moments[0], rows.moments[1], rows.buffers = (
            tensors for tensors, _ in guarded
        )
        slots, other = (ops.make_slots(rows.layout.num_slots) for _ in range(2))
        results = []
        for each, into in ((rows, slots), (expected, other)):
            adam(each)
            momentum_sgd(each)
            ops.accumulate_(each.sums, each.params, each.layout, slots=into)
            ops.scale_(each.sums, torch.full((3,), 0.5, dtype=torch.float64), each.layout)
            for op in (ops.sum_squares_, ops.max_abs_):
                results.append(ops.make_slots(slots.numel()))
                op(results[-1], each.sums, each.layout)
        assert_all_bit_equal(rows.written(), expected.written())
        assert_all_bit_equal([slots, *results[:2]], [other, *results[2:]])
        assert all((between() == 7.0).all() for _, between in guarded)


def rows_of_more_than_2_to_the_31_elements(backend):
    """A row's address is moved back by as many elements as its chunks are moved on."""
    rows = make_rows("reference", [16385, 5], torch.float32)
    far, near = on(backend, rows), on(backend, rows)
    adam(far)
    table = far.layout.cache["triton"]
    for name in ("params", "sums", "moments", "steps"):
        fresh = clones(getattr(rows, name)) if name != "moments" else None
        tensors = getattr(far, name) if fresh else list(itertools.chain(*far.moments))
        for old, new in zip(tensors, fresh or itertools.chain(*rows.moments), strict=True):
            old.copy_(new)
    table.chunks[:, 1] += FAR
    table.num_elements += FAR
    steps = table.addresses[7].clone()
    table.addresses[table.addresses != 0] -= FAR * 4
    table.addresses[7] = steps
    slots, expected = (ops.make_slots(far.layout.num_slots) for _ in range(2))
    for each, into in ((near, expected), (far, slots)):
        adam(each)
        ops.sum_squares_(into, each.sums, each.layout)
    assert_all_bit_equal(far.written(), near.written())
    assert_bit_equal(slots, expected)


def two_thousand_tensors_take_three_launches_at_most(backend):
    rows = on(backend, make_rows("reference", [3] * 2000, torch.float32))
    add_averages(rows)
    slots, stats, layout = ops.make_slots(2000), ops.make_stats(), rows.layout
    launched, launcher = [], vars(backend)["_launcher"]
    launcher.run = lambda kernel, *rest, **options: launched.append(kernel)
    try:
        for op in (
            lambda: ops.sum_squares_(slots, rows.sums, layout),
            lambda: ops.max_abs_(slots, rows.sums, layout),
            lambda: ops.accumulate_(rows.sums, rows.params, layout, slots=slots),
            lambda: ops.coefficient_(stats, slots, layout, divisor=1.0, max_norm=1.0),
            lambda: ops.scale_(rows.sums, stats, layout),
            lambda: adam(rows),
            lambda: momentum_sgd(rows),
            lambda: move_average(rows),
        ):
            launched.clear()
            op()
            assert 1 <= len(launched) <= 3
    finally:
        del launcher.run


def addresses_are_sent_when_one_has_changed_and_checked_again(backend):
    rows = on(backend, make_rows("reference", [300, 5], torch.float32))
    momentum_sgd(rows)
    addresses = rows.layout.cache["triton"].addresses
    version = addresses._version
    momentum_sgd(rows)
    assert addresses._version == version
    rows.sums[0] = rows.sums[0].clone()
    momentum_sgd(rows)
    assert addresses._version == version + 1
    memory = torch.zeros(300)
    rows.params[0].data = memory[:8]
    try:
        momentum_sgd(rows)
    except TypeError as refused:
        assert "PARAM 0: must hold 300 values" in str(refused)
    else:
        raise AssertionError("a tensor of other memory was written")
    assert not memory.any()


def states_of_another_dtype_are_taken_in_the_same_layout(backend):
    rows = make_rows("reference", [300, 5], torch.bfloat16, state=torch.float32)
    ours, specified = on(backend, rows), on(ops.make_backend("reference"), rows)
    for each in (ours, specified):
        momentum_sgd(each)
        each.buffers = [b.to(torch.float16) for b in each.buffers]
        each.layout.adopt_state_dtypes(each.buffers)
        momentum_sgd(each)
    assert_all_bit_equal([*ours.params, *ours.buffers], [*specified.params, *specified.buffers])
