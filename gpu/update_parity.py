"""Every update of parameters, against the specification on CPU copies of the same tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from fused import (
    PLAIN_ADAM,
    PLAIN_SGD,
    Rows,
    add_averages,
    add_masters,
    every_upper_half,
    exact_params,
    make_rows,
)
from tensors import random_list
from tolerance import assert_all_bit_equal, assert_bit_equal
from torch import Tensor

from gpu.subject import REFERENCE, Subject, compare, on
from gpu.updates import MOMENTUM, adam_, average_, sgd_
from stepclock_ext import ops

__all__ = ["ADAM_CHECKS", "SGD_CHECKS"]

KEY = 0xC0FFEE1234567890
ALIGNMENTS = (False, True)
FLAGS = ("decoupled", "amsgrad", "maximize")
FULL_ADAM = {**PLAIN_ADAM, "amsgrad": True, "weight_decay": 0.3}
Update = Callable[[Rows], None]


def transposed(tensor: Tensor) -> Tensor:
    """The same elements as a transposed matrix, where three rows of them can be made."""
    size = tensor.numel()
    return tensor.view(3, -1).t() if size and size % 3 == 0 else tensor


def every_size_and_dtype(subject: Subject, update: Update) -> None:
    for dtype, unaligned in itertools.product(subject.dtypes, ALIGNMENTS):
        compare(subject, make_rows("reference", subject.sizes, dtype, unaligned=unaligned), update)


def strided(subject: Subject, update: Update) -> None:
    for dtype in subject.dtypes:
        compare(
            subject, make_rows("reference", [3 * 4111, 5, 0, 9], dtype, like=transposed), update
        )


def sums_and_states_of_other_dtypes(subject: Subject, update: Update) -> None:
    states = (torch.bfloat16, torch.float16, torch.float32)
    for dtype, state in itertools.product(subject.halves, states):
        rows = make_rows("reference", subject.edges, dtype, sums=torch.float32, state=state)
        compare(subject, rows, update)


def masters_and_averages(subject: Subject, update: Callable[..., None]) -> None:
    for dtype, unaligned in itertools.product((*subject.halves, torch.float32), ALIGNMENTS):
        wide = torch.float32
        rows = make_rows(
            "reference", subject.sizes, dtype, sums=wide, state=wide, unaligned=unaligned
        )
        if dtype in ops.HALVES:
            add_masters(rows, exact_params(rows.params))
            compare(subject, rows, update)
        add_averages(rows)
        compare(subject, rows, partial(update, average_weight=0.1))


def stochastic_rounding(subject: Subject, update: Callable[..., None]) -> None:
    for dtype in subject.halves:
        rows = make_rows("reference", subject.sizes, dtype, sums=torch.float32)
        compare(subject, rows, partial(update, rounding_key=KEY))


def a_gate(subject: Subject, update: Callable[..., None]) -> None:
    """Shut where the norm is not finite, and then nothing is written; open where it is."""
    for dtype, masters in ((torch.float32, False), (torch.bfloat16, True)):
        rows = make_rows("reference", subject.edges, dtype, sums=torch.float32)
        if masters:
            add_masters(rows, exact_params(rows.params))
        add_averages(rows)
        gated = partial(update, average_weight=0.1, is_gated=True)
        compare(subject, rows, gated)
        for norm in (math.nan, math.inf, -math.inf):
            shut = on(rows, subject.backend)
            gated(shut, norm=norm)
            assert_all_bit_equal(on(shut, REFERENCE).written(), rows.written())
        opened = on(rows, subject.backend)
        update(opened, average_weight=0.1, norm=math.inf)
        assert not torch.equal(opened.written()[-1].cpu(), rows.written()[-1]), "nothing moved"


def values_that_are_not_finite(subject: Subject, update: Update) -> None:
    for dtype in subject.dtypes:
        rows = make_rows("reference", [257], dtype)
        poison = torch.tensor([math.nan, math.inf, -math.inf]).to(dtype)
        rows.sums[0][[0, 100, 256]] = poison
        rows.params[0][7] = -math.inf
        compare(subject, rows, update)


def every_flag_of_adam(subject: Subject) -> None:
    flags = itertools.product((False, True), (False, True), (False, True), (0.0, 0.3))
    pairs = zip(flags, itertools.cycle(subject.dtypes))
    for (*switches, decay), dtype in itertools.islice(pairs, 0, None, subject.every):
        named = dict(zip(FLAGS, switches, strict=True), weight_decay=decay)
        rows = make_rows("reference", subject.edges, dtype, unaligned=named["maximize"])
        compare(subject, rows, partial(adam_, flags=named))


def sgd_flags() -> Iterator[tuple[dict[str, Any], bool]]:
    """Flags, and whether the buffer is stored; that matters with momentum alone."""
    momenta = [(0.0, 0.0, False), (0.9, 0.0, False), (0.9, 0.5, False), (0.9, 0.0, True)]
    kinds = itertools.product(momenta, (0.0, 0.3), (False, True), (False, True))
    for (momentum, dampening, nesterov), decay, maximize, first in kinds:
        named = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov}
        if momentum or not first:
            yield {**PLAIN_SGD, **named, "weight_decay": decay, "maximize": maximize}, first


def every_flag_of_sgd(subject: Subject) -> None:
    pairs = zip(sgd_flags(), itertools.cycle(subject.dtypes))
    for (flags, first), dtype in itertools.islice(pairs, 0, None, subject.every):
        rows = make_rows("reference", subject.edges, dtype, unaligned=first)
        compare(subject, rows, partial(sgd_, flags=flags, first=first))


def the_first_momentum_is_not_read(subject: Subject) -> None:
    rows = on(make_rows("reference", [257], torch.float32), subject.backend)
    rows.buffers[0].fill_(math.nan)
    sgd_(rows, first=True)
    assert all(t.isfinite().all() for t in (*rows.params, *rows.buffers))


def bits_of_stochastic_rounding(subject: Subject) -> None:
    """0 - 1 * (-1 * x): nothing but the rounding of x, which has no other bits."""
    plain = {**PLAIN_SGD, "lr": 1.0}
    lists = [random_list(subject.sizes, torch.float32, seed=5), [upper_halves(subject)]]
    for dtype, values in itertools.product(subject.halves, lists):
        params = [torch.zeros_like(x, dtype=dtype) for x in values]
        layout = ops.Layout.of(REFERENCE, params, accumulate_dtype=torch.float32)
        rows = Rows(layout, params, values, [[], [], []], [], [])
        update = partial(sgd_, flags=plain, coefficient=-1.0, rounding_key=KEY)
        compare(subject, rows, update, exact=True)


def remainders_of_every_exponent(subject: Subject) -> None:
    values = upper_halves(subject)
    half, remainder = ops.split(values)
    layout = ops.Layout.of(REFERENCE, [half], accumulate_dtype=torch.float32)
    rows = Rows(layout, [half], [torch.zeros_like(values)], [[], [], []], [], [])
    rows.masters = [remainder]
    same = on(rows, subject.backend)
    sgd_(same, PLAIN_SGD)
    assert_bit_equal(same.params[0].cpu(), half)
    known = ~values.isnan()
    assert_bit_equal(same.written()[-1].cpu()[known], remainder[known])
    rows.sums = [(values * 0.3).nan_to_num(0.0, 1.0, 1.0)]
    compare(subject, rows, partial(sgd_, flags=PLAIN_SGD), exact=True)


def averages_alone(subject: Subject) -> None:
    for dtype in subject.dtypes:
        rows = make_rows("reference", subject.sizes, dtype)
        add_averages(rows)
        if dtype in ops.HALVES:
            add_masters(rows, exact_params(rows.params))
        elif not dtype.is_complex:
            for column in (rows.params, rows.averages):
                column[-1][5] = -math.inf
        compare(subject, rows, partial(average_, average_weight=0.1), exact=True)


def upper_halves(subject: Subject) -> Tensor:
    """fp32 numbers of all exponents, or one in so many of them."""
    values: Tensor = every_upper_half()
    return values if subject.every == 1 else values[:: 101 * subject.every].clone()


def _named(checks: dict[str, Callable[..., None]], update: Update) -> dict[str, Any]:
    return {name: partial(check, update=update) for name, check in checks.items()}


_OF_BOTH: dict[str, Callable[..., None]] = {
    check.__name__: check
    for check in (
        every_size_and_dtype,
        masters_and_averages,
        a_gate,
        stochastic_rounding,
        sums_and_states_of_other_dtypes,
        strided,
        values_that_are_not_finite,
    )
}

ADAM_CHECKS: dict[str, Callable[[Subject], None]] = {
    **_named(_OF_BOTH, partial(adam_, flags=FULL_ADAM)),
    "every_flag_of_adam": every_flag_of_adam,
}

SGD_CHECKS: dict[str, Callable[[Subject], None]] = {
    **_named(_OF_BOTH, partial(sgd_, flags=MOMENTUM)),
    "bits_of_stochastic_rounding": bits_of_stochastic_rounding,
    "remainders_of_every_exponent": remainders_of_every_exponent,
    "the_first_momentum_is_not_read": the_first_momentum_is_not_read,
    "averages_alone": averages_alone,
    "a_gate_of_averages": partial(a_gate, update=average_),
    "every_flag_of_sgd": every_flag_of_sgd,
}
