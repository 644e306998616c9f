"""Checks of the Triton kernels that read gradients: run by triton_process.py."""

import itertools
import math

import torch
from tensors import DTYPES, HALVES, clones, random_list
from tolerance import assert_all_bit_equal, assert_bit_equal, assert_close, assert_near
from triton_process import EDGES, REFERENCE, SIZES, layouts

from stepclock_ext import ops

# Of gradients and sums.
PAIRS = [*((dtype, dtype) for dtype in DTYPES), *((half, torch.float32) for half in HALVES)]


def sums_and_maxima(backend):
    for number, dtype in enumerate(DTYPES):
        tensors = random_list(SIZES, dtype, unaligned=number % 2 == 1)
        ours, specified = layouts(backend, tensors, dtype)
        slots, expected = (ops.make_slots(ours.num_slots) for _ in range(2))
        ops.sum_squares_(slots, tensors, ours)
        ops.sum_squares_(expected, tensors, specified)
        ratio = slots / expected
        assert_close(ratio, torch.ones_like(ratio), num_roundings=ops.CHUNK_ELEMENTS)
        ops.max_abs_(slots, tensors, ours)
        ops.max_abs_(expected, tensors, specified)
        assert_bit_equal(slots, expected)


def slots_of_other_rows(backend):
    tensors = random_list([16385, 0, 3], torch.float32)
    layout = ops.Layout.of(backend, tensors, [4, 1, 9])
    for op in (ops.sum_squares_, ops.max_abs_):
        slots = torch.full((12,), -7.0, dtype=torch.float64)
        op(slots, tensors, layout)
        assert (slots != -7.0).nonzero().flatten().tolist() == [4, 5, 9]


def accumulation(backend):
    for number, ((dtype, kind), store) in enumerate(itertools.product(PAIRS, (False, True))):
        unaligned = number % 4 in (1, 2)
        grads = random_list(EDGES, dtype, seed=1)
        sums = random_list(EDGES, kind, seed=2, unaligned=unaligned)
        if store:
            sums = [torch.full_like(t, math.nan) for t in sums]
        ours, specified = layouts(backend, grads, kind)
        expected, before = clones(sums), clones(sums)
        now, of_grads, prior, again = (ops.make_slots(ours.num_slots) for _ in range(4))
        into = dict(slots=now, grad_slots=of_grads, prior_slots=prior)
        ops.accumulate_(sums, grads, ours, store=store, **into)
        ops.accumulate_(expected, grads, specified, store=store)
        assert_all_bit_equal(sums, expected)
        ops.sum_squares_(again, sums, ours)
        assert_bit_equal(now, again)
        ops.sum_squares_(again, [g.to(kind) for g in grads], ours)
        assert_bit_equal(of_grads, again)
        again.zero_()
        if not store:
            ops.sum_squares_(again, before, ours)
        assert_bit_equal(prior, again)


def values_that_are_not_finite(backend):
    for dtype, poison in itertools.product(DTYPES, (math.nan, math.inf, -math.inf)):
        tensors = random_list([300, 2049, 16385, 16385], dtype)
        for tensor, place in zip(tensors[:3], (0, 2048, 16384), strict=True):
            ops.real_view(tensor).view(-1)[place] = poison
        layout = ops.Layout.of(backend, tensors)
        for op in (ops.sum_squares_, ops.max_abs_):
            slots = ops.make_slots(layout.num_slots)
            op(slots, tensors, layout)
            chunks = [0, 1, 3]
            assert (~slots.isfinite()).nonzero().flatten().tolist() == chunks
            assert_bit_equal(slots[chunks], torch.full_like(slots[chunks], abs(poison)))


def the_coefficient(backend):
    layout = ops.Layout.of(backend, [])
    cases = itertools.product((0, 1, 1001, 20_000), (False, True), (1.0, 3.0), (1e-6, math.inf))
    for num_slots, maxima, divisor, max_norm in cases:
        (slots,) = random_list([num_slots], torch.float64)
        slots.square_()
        for poison in (None, math.nan, math.inf) if num_slots else (None,):
            if poison is not None:
                slots[num_slots // 2] = poison
            stats, expected = ops.make_stats(), ops.make_stats()
            options = dict(divisor=divisor, max_norm=max_norm, maxima=maxima)
            ops.coefficient_(stats, slots, layout, **options)
            REFERENCE.coefficient_(expected, slots, **options)
            for got, want in zip(stats, expected, strict=True):
                assert_near(got, want, num_roundings=max(num_slots, 1))


def scaling(backend):
    stats = torch.tensor([0.0, -1 / 3, 1.0], dtype=torch.float64)
    for dtype, unaligned in itertools.product(DTYPES, (False, True)):
        tensors = random_list([3 * 4111, *EDGES], dtype, unaligned=unaligned)
        tensors[0] = tensors[0].view(3, -1).t()
        expected = clones(tensors)
        ours, specified = layouts(backend, tensors, dtype)
        ops.scale_(tensors, stats, ours)
        ops.scale_(expected, stats, specified)
        assert_all_bit_equal(tensors, expected)
