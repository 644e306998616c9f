"""Holds a remapped curve against its promise before anybody trains with it."""

from __future__ import annotations

import math
from fractions import Fraction

from .remapped_curve import RemappedCurve

__all__ = ["prove"]


def prove(curve: RemappedCurve) -> None:
    """Works out anew how the rest begins, what its first update uses and where it lands.

    Raises:
        AssertionError: the curve is not what the remap promises, which is our own bug.
    """
    total = curve.total_updates
    if curve.lands:
        last = curve.rest_at(total)
        assert last == curve.min_lr, f"update {total} must land at {curve.min_lr}, has {last}"
    if curve.remaining == 0:
        return
    begins, current = curve.rest_at(curve.start), _current(curve)
    assert _is_same(begins, current), f"the rest must begin at {current}, has {begins}"
    first, promised = curve.lr_at(curve.start + 1), _first(curve, current)
    assert _is_same(first, promised), f"the first rate must be {promised}, is {first}"


def _current(curve: RemappedCurve) -> float:
    """The rate that the rest begins with; a curve that has landed stays at the landing."""
    before, start = curve.before, curve.start
    if curve.how in ("keep_lr", "hold"):
        return curve.factor * before.lr_at_position(max(1, start))
    rate = before.lr_at_position(start)
    has_landed = before.lands and rate == before.min_lr and not curve.in_warmup(start)
    return curve.min_lr if has_landed else curve.factor * rate


def _first(curve: RemappedCurve, current: float) -> float:
    """The rate of the first update, from the words of the remap."""
    before, start, low = curve.before, curve.start, curve.min_lr
    if curve.how == "hold":
        return current
    if curve.shape is not None:
        return low + (current - low) * curve.shape.lr_at(1)
    share = 1 / Fraction(curve.remaining)
    if curve.samples is not None and share < 1:
        share = Fraction(curve.samples.share(1))
    place = float(start + max(0, before.total_updates - start) * share)
    rate = before.lr_at_position(place)
    if not before.lands or curve.in_warmup(start + 1):
        return curve.factor * rate
    top, old_low = before.lr_at_position(start), before.min_lr
    if curve.in_warmup(start):
        top, current = curve.peak / curve.factor, curve.peak
    return low if top == old_low else low + (current - low) * ((rate - old_low) / (top - old_low))


def _is_same(rate: float, other: float) -> bool:
    return math.isclose(rate, other, rel_tol=1e-9, abs_tol=1e-15)
