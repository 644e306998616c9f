"""fp32 sums beside 16-bit gradients: what is added and what the slots say."""

import itertools
import math

import pytest
import torch
from fused import in_every_way
from tensors import (
    BACKENDS,
    HALVES,
    SIZES,
    clones,
    coefficient_stats,
    dtype_name,
    interleaved_sizes,
    random_list,
)
from test_kernels import chunk_values, strided_list, sum_of_squares
from test_nonfinite_kernels import nonfinite_slots, poisoned_list
from tolerance import assert_all_bit_equal, assert_bit_equal, assert_close

from stepclock_ext import ops

each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_half = pytest.mark.parametrize("dtype", HALVES, ids=dtype_name)
each_alignment = pytest.mark.parametrize("unaligned", [False, True], ids=["aligned", "unaligned"])
needs_cpu = pytest.mark.skipif("cpu" not in BACKENDS, reason="the kernels were not built")
SLOTS = ("slots", "grad_slots", "prior_slots")


def wide_layout(backend, tensors, first_slots=None):
    made = ops.make_backend(backend)
    return ops.Layout.of(made, tensors, first_slots, accumulate_dtype=torch.float32)


def accumulate(accumulators, grads, layout, *, store=False, wanted=SLOTS):
    """The slots that were asked for, by name."""
    made = {name: ops.make_slots(layout.num_slots) for name in wanted}
    ops.accumulate_(accumulators, grads, layout, store=store, **made)
    return made


def squares_of(backend, tensors):
    """The slots of a read of their own."""
    layout = wide_layout(backend, [t.float() for t in tensors])
    slots = ops.make_slots(layout.num_slots)
    ops.sum_squares_(slots, [t.float() for t in tensors], layout)
    return slots


@each_backend
@each_half
@each_alignment
def test_a_window_of_16_bit_gradients_is_summed_in_fp32(backend, dtype, unaligned):
    accumulators = [torch.full_like(t, math.nan) for t in random_list(SIZES, torch.float32)]
    micros = [random_list(SIZES, dtype, seed=s, unaligned=unaligned) for s in (1, 2, 3)]
    layout = wide_layout(backend, micros[0])
    for step, grads in enumerate(micros):
        before = clones(accumulators)
        accumulate(accumulators, grads, layout, store=step == 0)
        wide = [g.float() for g in grads]
        sums = [a + g for a, g in zip(before, wide, strict=True)]
        assert_all_bit_equal(accumulators, wide if step == 0 else sums)
    for row, accumulator in enumerate(accumulators):
        exact = sum(grads[row].double() for grads in micros)
        assert_close(accumulator, exact, num_roundings=2)


@each_backend
@each_half
@each_alignment
@pytest.mark.parametrize("store", [False, True])
def test_the_slots_are_the_sums_of_squares_before_of_the_gradient_and_after(
    backend, dtype, unaligned, store
):
    accumulators = random_list(SIZES, torch.float32, seed=1, unaligned=unaligned)
    grads = random_list(SIZES, dtype, seed=2, unaligned=not unaligned)
    before = clones(accumulators)
    slots = accumulate(accumulators, grads, wide_layout(backend, grads), store=store)
    sides = {"slots": accumulators, "grad_slots": grads, "prior_slots": before}
    for name, tensors in sides.items():
        if name == "prior_slots" and store:
            assert not slots[name].any()
            continue
        assert_bit_equal(slots[name], squares_of(backend, tensors))
        expected = chunk_values(tensors, sum_of_squares)
        ones = torch.ones_like(expected)
        assert_close(slots[name] / expected, ones, num_roundings=ops.CHUNK_ELEMENTS)


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES, torch.complex64])
@pytest.mark.parametrize("store", [False, True])
def test_the_slots_of_sums_in_the_gradients_own_dtype_are_those_of_a_read(backend, dtype, store):
    accumulators, grads = (random_list(SIZES, dtype, seed=seed) for seed in (1, 2))
    layout = ops.Layout.of(ops.make_backend(backend), grads)
    expected = {name: ops.make_slots(layout.num_slots) for name in SLOTS}
    ops.sum_squares_(expected["grad_slots"], grads, layout)
    if not store:
        ops.sum_squares_(expected["prior_slots"], accumulators, layout)
    slots = accumulate(accumulators, grads, layout, store=store)
    ops.sum_squares_(expected["slots"], accumulators, layout)
    for name in SLOTS:
        assert_bit_equal(slots[name], expected[name])


@each_backend
@pytest.mark.parametrize("wide", [False, True], ids=["own", "fp32"])
@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=dtype_name)
def test_which_slots_are_asked_for_changes_no_bit(backend, dtype, store, wide):
    grads, written = random_list([16385, 1, 300], dtype, seed=2), []
    kind = torch.float32 if wide else dtype
    for number in range(len(SLOTS) + 1):
        for wanted in itertools.combinations(SLOTS, number):
            accumulators = random_list([16385, 1, 300], kind, seed=1)
            layout = ops.Layout.of(ops.make_backend(backend), grads, accumulate_dtype=kind)
            written.append(
                (accumulators, accumulate(accumulators, grads, layout, store=store, wanted=wanted))
            )
    whole_sums, whole_slots = written[-1]
    for accumulators, slots in written[:-1]:
        assert_all_bit_equal(accumulators, whole_sums)
        for name, values in slots.items():
            assert_bit_equal(values, whole_slots[name])


@each_backend
@each_half
def test_wide_sums_pair_elements_whatever_the_strides(backend, dtype):
    accumulators, grads = strided_list(torch.float32, seed=1), strided_list(dtype, seed=2)
    expected = [a + g.float() for a, g in zip(accumulators, grads, strict=True)]
    slots = accumulate(accumulators, grads, wide_layout(backend, grads))
    assert_all_bit_equal(accumulators, expected)
    values = chunk_values(grads, sum_of_squares)
    ones = torch.ones_like(values)
    assert_close(slots["grad_slots"] / values, ones, num_roundings=ops.CHUNK_ELEMENTS)


@each_backend
@each_half
def test_many_small_rows_with_empty_ones_between_shift_nothing(backend, dtype):
    sizes = interleaved_sizes()
    accumulators = random_list(sizes, torch.float32, seed=1)
    grads = random_list(sizes, dtype, seed=2)
    expected = [a + g.float() for a, g in zip(accumulators, grads, strict=True)]
    slots = accumulate(accumulators, grads, wide_layout(backend, grads))
    assert_all_bit_equal(accumulators, expected)
    assert_bit_equal(slots["slots"], squares_of(backend, expected))


@each_backend
def test_rows_of_every_dtype_may_share_a_layout_with_wide_sums(backend):
    dtypes = [torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.complex64]
    grads = [random_list([16385], dtype, seed=2)[0] for dtype in dtypes]
    sums = [torch.float32 if t.dtype in HALVES else t.dtype for t in grads]
    accumulators = [random_list([16385], dtype, seed=1)[0] for dtype in sums]
    expected = [a + g.to(a.dtype) for a, g in zip(accumulators, grads, strict=True)]
    accumulate(accumulators, grads, wide_layout(backend, grads))
    assert_all_bit_equal(accumulators, expected)


@each_backend
def test_wide_sums_leave_the_slots_of_other_rows_alone(backend):
    grads = random_list([16385, 0, 3], torch.bfloat16)
    layout = wide_layout(backend, grads, [4, 1, 9])
    accumulators = [g.float() for g in grads]
    slots = [torch.full((12,), -7.0, dtype=torch.float64) for _ in SLOTS]
    ops.accumulate_(accumulators, grads, layout, **dict(zip(SLOTS, slots, strict=True)))
    for values in slots:
        assert (values != -7.0).nonzero().flatten().tolist() == [4, 5, 9]


@each_backend
@each_half
def test_a_wide_sum_holds_what_the_gradients_dtype_cannot(backend, dtype):
    large, one = [torch.tensor([2.0**11]).to(dtype)], [torch.ones(1, dtype=dtype)]
    accumulators, layout = [torch.zeros(1)], wide_layout(backend, large)
    accumulate(accumulators, large, layout, store=True)
    accumulate(accumulators, one, layout)
    assert accumulators[0].tolist() == [2.0**11 + 1]
    assert (large[0] + one[0]).tolist() == [2.0**11]
    top = [torch.tensor([torch.finfo(torch.float16).max]).to(dtype)]
    accumulate(accumulators, top, layout, store=True)
    slots = accumulate(accumulators, top, layout)
    assert accumulators[0].tolist() == [2 * top[0].item()]
    assert slots["slots"].tolist() == [(2 * top[0].item()) ** 2]


@each_backend
@each_half
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("store", [False, True])
def test_a_bad_gradient_shows_in_the_slots_of_its_chunk_and_later_in_the_prior_ones(
    backend, dtype, poison, store
):
    bad, chunks = poisoned_list(dtype, poison)
    good = [torch.ones_like(t) for t in bad]
    accumulators, layout = [t.float() for t in good], wide_layout(backend, bad)
    slots = accumulate(accumulators, bad, layout, store=store)
    assert [nonfinite_slots(slots[name]) for name in SLOTS] == [chunks, chunks, []]
    slots = accumulate(accumulators, good, layout)
    assert [nonfinite_slots(slots[name]) for name in SLOTS] == [chunks, [], chunks]


@each_backend
@each_half
def test_wide_sums_are_measured_and_scaled_as_fp32_tensors_are(backend, dtype):
    sums, others = (random_list(SIZES, torch.float32, seed=1) for _ in range(2))
    layouts = [wide_layout(backend, random_list(SIZES, dtype)), wide_layout(backend, others)]
    slots = [ops.make_slots(layouts[0].num_slots) for _ in range(4)]
    for i, (tensors, layout) in enumerate(zip((sums, others), layouts, strict=True)):
        ops.sum_squares_(slots[i], tensors, layout)
        ops.max_abs_(slots[2 + i], tensors, layout)
        ops.scale_(tensors, coefficient_stats(1 / 3), layout)
    assert_bit_equal(slots[0], slots[1])
    assert_bit_equal(slots[2], slots[3])
    assert_all_bit_equal(sums, others)


@each_backend
@pytest.mark.parametrize("wide", [torch.float32, None], ids=["fp32", "own"])
def test_sums_of_another_dtype_than_the_layouts_are_refused_and_nothing_is_written(backend, wide):
    grads = random_list([40, 300], torch.bfloat16)
    layout = ops.Layout.of(ops.make_backend(backend), grads, accumulate_dtype=wide)
    accumulators = [g.float() if wide is None else g.clone() for g in grads]
    before = clones(accumulators)
    with pytest.raises(TypeError, match=r"^ACCUMULATOR 0: must hold 40 values"):
        accumulate(accumulators, grads, layout)
    assert_all_bit_equal(accumulators, before)


@needs_cpu
@each_half
@pytest.mark.parametrize("store", [False, True])
def test_threads_and_instruction_sets_sum_alike(dtype, store):
    def run():
        accumulators = random_list(SIZES, torch.float32, seed=1, unaligned=True)
        grads = random_list(SIZES, dtype, seed=2)
        slots = accumulate(accumulators, grads, wide_layout("cpu", grads), store=store)
        return [*accumulators, *slots.values()]

    results = in_every_way(run)
    for other in results[1:]:
        assert_all_bit_equal(other, results[0])
