"""The CUDA kernel that turns a window's slots into its coefficient, run by the simulator."""

import math

import pytest
import torch
from simulated import SimulatedBackend
from tensors import random_list
from tolerance import assert_bit_equal, assert_near

from stepclock_ext import ops

# Around the threads of a block, the slots of a block, and several blocks.
NUM_SLOTS = [1, 2, 511, 512, 513, 1023, 1024, 1025, 5_000, 70_000]


@pytest.fixture(scope="module")
def loaded():
    return SimulatedBackend()


@pytest.fixture
def backend(loaded):
    """The simulated kernels, in the plain order and with new scratch."""
    loaded.scratch.zero_()
    yield loaded
    loaded.set_order()


def squares(num_slots):
    (slots,) = random_list([num_slots], torch.float64)
    return slots.square()


def stats_of(backend, slots, *, divisor=3.0, max_norm=1.0, maxima=False):
    stats = torch.full((3,), -7.0, dtype=torch.float64)
    layout = ops.Layout.of(backend, [])
    ops.coefficient_(stats, slots, layout, divisor=divisor, max_norm=max_norm, maxima=maxima)
    return stats


def assert_stats(stats, slots, *, divisor=3.0, max_norm=1.0, maxima=False):
    values = slots.tolist()
    norm = (max(values) if maxima else math.sqrt(math.fsum(values))) / divisor
    clip = 1.0 if math.isinf(max_norm) else min(1.0, max_norm / (norm + 1e-6))
    for got, want in zip(stats.tolist(), [norm, clip / divisor, clip], strict=True):
        assert_near(got, want, num_roundings=len(values))


@pytest.mark.parametrize("maxima", [False, True])
@pytest.mark.parametrize("num_slots", NUM_SLOTS)
def test_the_coefficient_is_the_clip_over_the_divisor(backend, num_slots, maxima):
    slots = squares(num_slots)
    for max_norm in (1e-6, 1e9, math.inf):
        rule = dict(divisor=65536.0, max_norm=max_norm, maxima=maxima)
        assert_stats(stats_of(backend, slots, **rule), slots, **rule)


@pytest.mark.slow
def test_more_slots_than_blocks_hold_make_the_blocks_larger(backend):
    slots = squares(4096 * 1024 + 1)
    assert_stats(stats_of(backend, slots), slots)


@pytest.mark.parametrize("maxima", [False, True])
@pytest.mark.parametrize("num_slots", [1025, 5_000, 70_000])
def test_no_order_of_blocks_and_threads_changes_a_bit(backend, num_slots, maxima):
    slots = squares(num_slots)
    expected = stats_of(backend, slots, maxima=maxima)
    for blocks, threads in [(1, 0), (0, 1), (1, 1), (5, 0)]:
        backend.set_order(blocks=blocks, threads=threads)
        assert_bit_equal(stats_of(backend, slots, maxima=maxima), expected)


def test_the_scratch_serves_one_window_after_another(backend):
    """The last block sets the count of blocks back to zero: what it left is used again."""
    for num_slots in (70_000, 1, 5_000, 1025):
        slots = squares(num_slots)
        assert_stats(stats_of(backend, slots), slots)
        assert backend.scratch[-8:].tolist() == [0] * 8


@pytest.mark.parametrize("maxima", [False, True])
def test_no_slot_at_all_is_a_norm_of_zero(backend, maxima):
    stats = stats_of(backend, ops.make_slots(0), divisor=2.0, maxima=maxima)
    assert stats.tolist() == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("maxima", [False, True])
@pytest.mark.parametrize("place", [0, 700, 1024, 4999])
def test_a_slot_that_is_not_finite_makes_the_norm_so(backend, maxima, place):
    slots = torch.ones(5_000, dtype=torch.float64)
    slots[place] = math.nan
    assert stats_of(backend, slots, maxima=maxima).isnan().all()
    slots[place] = math.inf
    assert stats_of(backend, slots, maxima=maxima)[0] == math.inf
