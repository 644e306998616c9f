"""A backend under test: the lists it is tried on, and comparison with the specification."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from fused import Rows, worth
from tensors import DTYPES
from tolerance import assert_all_bit_equal, assert_bit_equal, assert_close
from torch import Tensor

from stepclock_ext import ops

__all__ = ["REFERENCE", "TINY_SIZES", "Subject", "compare", "move", "move_list", "on"]

REFERENCE = ops.make_backend("reference")
NUM_ROUNDINGS = 16  # of an element in an update

# Nothing, one, blocks and chunks with their edges, many chunks; then what flags are tried on.
SIZES = [0, 1, 255, 257, 16383, 16384, 16385, 40_001, 1_000_003]
EDGES = [0, 1, 257, 16385]
SMALL_SIZES = [0, 1, 255, 257, 16385]
SMALL_EDGES = [0, 1, 257]
TINY_SIZES = [0, 1, 257]
TINY_DTYPES = [torch.float32, torch.bfloat16]


@dataclass
class Subject:
    """A backend, and how much is asked of it.

    Attributes:
        backend: under test.
        sizes: of the tensors that every dtype is tried on.
        edges: of those that every flag is tried on.
        dtypes: of parameters.
        every: of how many combinations of flags one is tried.
        twin: the C++ kernels, whose bits updates must have; None where there is none.
    """

    backend: ops.Backend
    sizes: list[int] = field(default_factory=lambda: SIZES)
    edges: list[int] = field(default_factory=lambda: EDGES)
    dtypes: list[torch.dtype] = field(default_factory=lambda: DTYPES)
    every: int = 1
    twin: ops.Backend | None = None

    @staticmethod
    def of(backend: ops.Backend, *, is_small: bool) -> Subject:
        """What a GPU is asked, or a dry run; least of all of Triton's interpreter."""
        has_twin = backend.name != "reference" and ops.backends()["cpu"].available
        twin = ops.make_backend("cpu") if has_twin else None
        if not is_small:
            return Subject(backend, twin=twin)
        if backend.name == "triton":
            tiny, dtypes = list(TINY_SIZES), list(TINY_DTYPES)
            return Subject(backend, tiny, tiny, dtypes, every=13, twin=twin)
        return Subject(backend, SMALL_SIZES, SMALL_EDGES, DTYPES, every=3, twin=twin)

    @property
    def halves(self) -> list[torch.dtype]:
        return [dtype for dtype in self.dtypes if dtype in ops.HALVES]

    def slots(self, layout: ops.Layout) -> Tensor:
        """Slots on the device, filled with what no op leaves there."""
        return ops.make_slots(layout.num_slots, self.backend.device).fill_(-7.0)

    def layouts(self, tensors: Sequence[Tensor], sums: torch.dtype) -> list[ops.Layout]:
        """Of CPU tensors: on the backend and on the reference."""
        wide = sums if sums != tensors[0].dtype else None
        backends = (self.backend, REFERENCE)
        return [ops.Layout.of(backend, tensors, accumulate_dtype=wide) for backend in backends]


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy with the same strides, that begins where the original does between aligned places."""
    first = tensor.storage_offset() % 16
    memory = torch.zeros(first + tensor.numel(), dtype=tensor.dtype, device=device)
    return memory.as_strided(tensor.shape, tensor.stride(), first).copy_(tensor)


def move_list(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """As `move`, of each."""
    return [move(tensor, device) for tensor in tensors]


def on(rows: Rows, backend: ops.Backend) -> Rows:
    """A copy of `rows` on a backend and its device."""
    layout = replace(
        rows.layout,
        backend=backend,
        verified={},
        cache={},
        state_dtypes=list(rows.layout.state_dtypes),
    )
    copied: dict[str, Any] = {
        name: None if tensors is None else move_list(tensors, backend.device)
        for name, tensors in vars(rows).items()
        if name not in ("layout", "moments")
    }
    moments = [move_list(column, backend.device) for column in rows.moments]
    return Rows(layout=layout, moments=moments, **copied)


@contextmanager
def labelled(label: str) -> Iterator[None]:
    """Says in an error what was compared."""
    try:
        yield
    except AssertionError as e:
        raise AssertionError(f"{label}: {e}") from e


def compare(
    subject: Subject, rows: Rows, update: Callable[[Rows], None], *, exact: bool = False
) -> None:
    """An update gives what the specification gives, the same bits twice, and those of the CPU.

    Args:
        subject: the backend.
        rows: on the CPU; left as they are.
        update: writes the rows that it is given.
        exact: the specification's arithmetic is the same, and so are its bits.
    """
    found = []
    for backend in (subject.backend, subject.backend, REFERENCE):
        each = on(rows, backend)
        update(each)
        found.append(on(each, REFERENCE))
    ours, again, specified = found
    with labelled("a second run"):
        assert_all_bit_equal(again.written(), ours.written())
    with labelled("the specification"):
        if exact:
            assert_all_bit_equal(ours.written(), specified.written())
        for got, want in zip(_values(ours), _values(specified), strict=True):
            assert_close(got, want, num_roundings=NUM_ROUNDINGS)
    if subject.twin is not None:
        twin = on(rows, subject.twin)
        update(twin)
        with labelled("the C++ kernels"):
            for got, want in zip(ours.written(), twin.written(), strict=True):
                assert_bit_equal(got, want)


def _values(rows: Rows) -> list[Tensor]:
    """What an update writes, as real numbers; remainders joined with what they complete."""
    written = [t for t in rows.written() if t.dtype != torch.int16]
    worths = [] if rows.masters is None else worth(rows)
    return [ops.real_view(t) for t in (*written, *worths)]
