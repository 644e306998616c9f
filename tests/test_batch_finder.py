"""The search for a batch size, with peaks that are given and with the memory of this process."""

import subprocess
import sys
import weakref

import pytest
import torch

from stepclock_ext import ClockedOptimizer
from stepclock_ext.batch_finder import Trial, find_batch_size

MIB = 1 << 20


class Machine:
    """A step with a peak of 100 bytes and 10 a sample; from `raises_at` samples on it fails."""

    def __init__(self, *, raises_at=None, error=None):
        self.raises_at, self.error = raises_at, error
        self.calls = []
        self.in_use = 0

    def step(self, batch_size):
        self.calls.append(batch_size)
        if self.raises_at is not None and batch_size >= self.raises_at:
            raise self.error
        self.in_use = 100 + 10 * batch_size

    def find(self, **options):
        options = {"budget_bytes": 1000, "measure": lambda: self.in_use, **options}
        return find_batch_size(self.step, **options)


def pair(found):
    return found.per_device_train_batch_size, found.gradient_accumulation_steps


def test_doubling_stops_past_the_limit_and_gives_the_batch_before():
    machine = Machine()
    found = machine.find(effective_batch_size=256)
    assert pair(found) == (64, 4)  # 740 of 850 allowed; 128 would take 1380
    assert [trial.batch_size for trial in found.trials] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert found.trials[-1] == Trial(128, 1380)
    assert machine.calls.count(64) == 20
    assert machine.calls.count(128) == 1  # the first step has shown it


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"start": 3, "effective_batch_size": 48}, (48, 1)),
        ({"start": 3, "effective_batch_size": 96}, (48, 2)),
        ({"effective_batch_size": 96}, (32, 3)),  # 64 does not divide 96
        ({"effective_batch_size": 96, "world_size": 4}, (8, 3)),
        ({"effective_batch_size": 7}, (1, 7)),
        ({"max_batch_size": 20}, (16, 1)),
        ({}, (64, 1)),
        ({"limit": 1.0, "budget_bytes": 740}, (64, 1)),  # on the limit is within it
        ({"limit": 1.0, "budget_bytes": 739}, (32, 1)),
    ],
)
def test_the_pair_keeps_the_effective_batch(options, expected):
    found = Machine().find(**options)
    assert pair(found) == expected
    effective = options.get("effective_batch_size")
    if effective is not None:
        assert expected[0] * expected[1] * options.get("world_size", 1) == effective


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory"
        ),
        RuntimeError("CUDA error: out of memory"),
    ],
    ids=["torch", "Python", "CPU", "CUDA"],
)
def test_running_out_of_memory_ends_the_search_as_the_limit_does(error):
    found = Machine(raises_at=16, error=error).find(effective_batch_size=64)
    assert pair(found) == (8, 8)
    assert found.trials[-1] == Trial(16, None)


def test_another_error_comes_through():
    with pytest.raises(RuntimeError, match="shapes"):
        Machine(raises_at=4, error=RuntimeError("shapes cannot be multiplied")).find()
    with pytest.raises(KeyError):
        Machine(raises_at=4, error=KeyError("x")).find()


def test_a_start_that_does_not_fit_is_said_with_its_peak():
    with pytest.raises(ValueError, match=r"start must fit into 0.85 of 1,000 bytes, .*1380\)"):
        Machine().find(start=128)
    with pytest.raises(ValueError, match="peak_bytes=None"):
        Machine(raises_at=1, error=MemoryError()).find()


def test_what_the_failed_step_held_is_let_go():
    held = []

    def step(batch_size):
        tensor = torch.ones(batch_size)
        if batch_size == 4:
            held.append(weakref.ref(tensor))
            raise MemoryError

    assert find_batch_size(step, budget_bytes=1, measure=lambda: 0).trials[-1] == Trial(4, None)
    assert held[0]() is None


def test_the_real_allocator_refuses_and_training_goes_on():
    w = torch.nn.Parameter(torch.ones(1))
    opt = ClockedOptimizer(torch.optim.SGD([w], lr=0.1))

    def step(batch_size):
        size = 1 << 55 if batch_size == 4 else batch_size  # no machine has 2**57 bytes
        opt.backward((w * torch.ones(size)).mean())
        opt.step()

    found = find_batch_size(step, budget_bytes=1000, measure=lambda: 0, iterations=2)
    assert pair(found) == (2, 1)
    opt.discard()
    step(1)
    assert opt.clock.update_step == 5


GROWTH = """
import torch
from stepclock_ext.batch_finder import find_batch_size

MIB = 2**20
found = find_batch_size(
    lambda size: torch.ones(size * MIB, dtype=torch.uint8),
    start=16,
    budget_bytes=160 * MIB,
    iterations=2,
)
print(found.per_device_train_batch_size, found.trials[-1].batch_size)
print(found.trials[-1].peak_bytes >= 120 * MIB)
"""


def test_on_a_cpu_the_growth_of_the_process_is_measured():
    if torch.cuda.is_available():
        pytest.skip("CUDA measures its own memory")
    # a process of its own: memory that earlier tests gave back would be used again unseen
    run = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["64", "128", "True"]


def test_on_a_cpu_the_budget_must_be_given():
    if torch.cuda.is_available():
        pytest.skip("CUDA knows its own memory")
    with pytest.raises(ValueError, match="budget_bytes must be given"):
        find_batch_size(lambda size: None)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"start": 0}, ValueError, "start must be 1 or more, got 0"),
        ({"start": 1.0}, TypeError, "start must be an integer, got 1.0"),
        ({"iterations": 0}, ValueError, "iterations must be 1 or more"),
        ({"limit": 1.5}, ValueError, "limit must be above 0 and at most 1, got 1.5"),
        ({"limit": float("nan")}, ValueError, "got nan"),
        ({"budget_bytes": 0}, ValueError, "budget_bytes must be 1 or more"),
        ({"start": 8, "effective_batch_size": 20}, ValueError, "world_size = 8, got 20"),
        ({"start": 8, "max_batch_size": 4}, ValueError, "must be start = 8 or more, got 4"),
    ],
)
def test_bad_arguments_are_named_before_a_step_runs(options, error, message):
    machine = Machine()
    with pytest.raises(error, match=message):
        machine.find(**options)
    assert machine.calls == []
