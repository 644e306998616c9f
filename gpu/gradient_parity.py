"""Every op that reads gradients, against the specification on CPU copies of the same tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensors import random_list
from tolerance import assert_all_bit_equal, assert_bit_equal, assert_close, assert_near
from torch import Tensor

from gpu.subject import REFERENCE, TINY_SIZES, Subject, move_list
from stepclock_ext import ops

__all__ = ["CHECKS"]

CPU = torch.device("cpu")
ALIGNMENTS = (False, True)


def transposed(size: int, dtype: torch.dtype) -> Tensor:
    """A matrix in memory order of its transpose, of three times `size` elements."""
    (flat,) = random_list([3 * size], dtype)
    matrix: Tensor = flat.view(3, -1).t()
    return matrix


def lists(subject: Subject) -> Iterator[list[Tensor]]:
    """Of every dtype, aligned and not, with a strided one among them."""
    for dtype, unaligned in itertools.product(subject.dtypes, ALIGNMENTS):
        tensors = random_list(subject.sizes, dtype, unaligned=unaligned)
        yield [*tensors, transposed(subject.edges[-1], dtype)]


def assert_same_sums(slots: Tensor, expected: Tensor) -> None:
    """Sums of squares of the same chunks, taken in some order."""
    ratio = torch.where(expected == 0, 1.0 + slots.cpu(), slots.cpu() / expected)
    assert_close(ratio, torch.ones_like(ratio), num_roundings=ops.CHUNK_ELEMENTS)


def chunk_sums_and_maxima(subject: Subject) -> None:
    for tensors in lists(subject):
        ours, specified = subject.layouts(tensors, tensors[0].dtype)
        there = move_list(tensors, subject.backend.device)
        slots, again, expected = subject.slots(ours), subject.slots(ours), ops.make_slots(10**4)
        expected = expected[: ours.num_slots]
        ops.sum_squares_(slots, there, ours)
        ops.sum_squares_(again, there, ours)
        ops.sum_squares_(expected, tensors, specified)
        assert_bit_equal(again, slots)
        assert_same_sums(slots, expected)
        ops.max_abs_(slots, there, ours)
        ops.max_abs_(expected, tensors, specified)
        assert_bit_equal(slots.cpu(), expected)


def slots_of_other_rows_are_left_alone(subject: Subject) -> None:
    tensors = random_list([16385, 0, 3], torch.float32)
    layout = ops.Layout.of(subject.backend, tensors, [4, 1, 9])
    there = move_list(tensors, subject.backend.device)
    for op in (ops.sum_squares_, ops.max_abs_):
        slots = torch.full((12,), -7.0, dtype=torch.float64, device=subject.backend.device)
        op(slots, there, layout)
        assert (slots != -7.0).nonzero().flatten().tolist() == [4, 5, 9]


def accumulation(subject: Subject) -> None:
    pairs = [*((d, d) for d in subject.dtypes), *((h, torch.float32) for h in subject.halves)]
    for (dtype, kind), unaligned, store in itertools.product(pairs, ALIGNMENTS, (False, True)):
        grads = random_list(subject.sizes, dtype, seed=1)
        sums = random_list(subject.sizes, kind, seed=2, unaligned=unaligned)
        if store:
            sums = [torch.full_like(t, math.nan) for t in sums]
        _accumulate_both(subject, sums, grads, store=store)


def _accumulate_both(
    subject: Subject, sums: list[Tensor], grads: list[Tensor], *, store: bool
) -> None:
    """With all slots, with one, with none; the sums bit by bit, the slots as sums are."""
    ours, specified = subject.layouts(grads, sums[0].dtype)
    expected = move_list(sums, CPU)
    wanted = [ops.make_slots(ours.num_slots) for _ in range(3)]
    names = ("slots", "grad_slots", "prior_slots")
    into = dict(zip(names, wanted, strict=True))
    ops.accumulate_(expected, grads, specified, store=store, **into)
    there = move_list(grads, subject.backend.device)
    for taken in (names, names, ("slots",), ()):
        ours_there = move_list(sums, subject.backend.device)
        slots = {name: subject.slots(ours) for name in taken}
        if store and "prior_slots" in slots:
            slots["prior_slots"].zero_()  # the specification leaves them alone: 0 where there is 0
        ops.accumulate_(ours_there, there, ours, store=store, **slots)
        assert_all_bit_equal(move_list(ours_there, CPU), expected)
        for name in taken:
            assert_same_sums(slots[name], into[name])


def values_that_are_not_finite(subject: Subject) -> None:
    for dtype, poison in itertools.product(subject.dtypes, (math.nan, math.inf, -math.inf)):
        tensors = random_list([300, 2049, 16385, 16385], dtype)
        for tensor, place in zip(tensors[:3], (0, 2048, 16384), strict=True):
            ops.real_view(tensor).view(-1)[place] = poison
        layout, specified = subject.layouts(tensors, dtype)
        there = move_list(tensors, subject.backend.device)
        for op in (ops.sum_squares_, ops.max_abs_):
            slots, expected = subject.slots(layout), ops.make_slots(layout.num_slots)
            op(slots, there, layout)
            op(expected, tensors, specified)
            assert_bit_equal(slots.cpu().isfinite(), expected.isfinite())
            bad = ~expected.isfinite()
            assert_bit_equal(slots.cpu()[bad], expected[bad])


def the_coefficient(subject: Subject) -> None:
    layout, device = ops.Layout.of(subject.backend, []), subject.backend.device
    most = 70_000 if subject.sizes != TINY_SIZES else 9_000
    cases = itertools.product((0, 1, 1001, most), (False, True), (1.0, 3.0), (1e-6, math.inf))
    for num_slots, maxima, divisor, max_norm in cases:
        (slots,) = random_list([num_slots], torch.float64)
        slots.square_()
        for poison in (None, math.nan, math.inf) if num_slots else (None,):
            if poison is not None:
                slots[num_slots // 2] = poison
            stats, again = (ops.make_stats(device) for _ in range(2))
            expected = ops.make_stats()
            options: dict[str, Any] = dict(divisor=divisor, max_norm=max_norm, maxima=maxima)
            there = slots.to(device)
            ops.coefficient_(stats, there, layout, **options)
            ops.coefficient_(again, there, layout, **options)
            REFERENCE.coefficient_(expected, slots, **options)
            assert_bit_equal(again, stats)
            for got, want in zip(stats.tolist(), expected.tolist(), strict=True):
                assert_near(got, want, num_roundings=max(num_slots, 1))


def scaling(subject: Subject) -> None:
    values = torch.tensor([0.0, -1 / 3, 1.0], dtype=torch.float64)
    for tensors in lists(subject):
        ours, specified = subject.layouts(tensors, tensors[0].dtype)
        there = move_list(tensors, subject.backend.device)
        ops.scale_(there, values.to(subject.backend.device), ours)
        expected = move_list(tensors, CPU)
        ops.scale_(expected, values, specified)
        assert_all_bit_equal(move_list(there, CPU), expected)


CHECKS: dict[str, Callable[[Subject], None]] = {
    check.__name__: check
    for check in (
        chunk_sums_and_maxima,
        accumulation,
        the_coefficient,
        scaling,
        values_that_are_not_finite,
        slots_of_other_rows_are_left_alone,
    )
}
