"""Our own reduction: each bucket of window sums goes out as soon as its gradients are in.

By default buckets are all-reduced, in fp32 where gradients have 16 bits. With sharded states they
are reduce-scattered: each process gets the sum of its share.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .buckets import Buckets
from .collectives import reduce_scatter_single
from .ranks import Ranks

__all__ = ["BucketReduction"]


class BucketReduction:
    """Sums of a window over all ranks, in one round or two.

    The first backward of a window's last micro step is the first round: each bucket goes out when
    its gradients are in, in the same order on every rank. A rank that ran none (no items, an ended
    loader) runs it when the ranks meet. Gradients that came after their bucket had gone (a second
    backward, a parameter that is visited twice) wait for a second round then::

        round 1:  the sum over ranks of what each has gathered
        round 2:  rank 0 keeps the result, the others begin at 0 again; what waited is added

    Args:
        buckets: the sums.
        ranks: who takes part.
        scatters: each rank gets its share alone.

    Attributes:
        is_averaged: False; what comes out is a sum.
        overlaps: buckets go out during backward; False until their order is known.
        is_open: the backward that runs is the window's last: what arrives is reduced.
        shares: of the sums, one a bucket; empty where every rank gets all.
        num_collectives: launched so far; it only grows, as does `num_bytes` handed to them.
        num_collectives_before: launched before this window.
    """

    is_averaged = False

    def __init__(self, buckets: Buckets, ranks: Ranks, *, scatters: bool = False) -> None:
        self.buckets = buckets
        self.ranks = ranks
        self.overlaps = True
        self.is_open = False
        self.num_collectives = 0
        self.num_collectives_before = 0
        self.num_bytes = 0
        self._scatters = scatters
        self.shares = [self._make_share(b) for b in range(len(buckets.all))] if scatters else []
        self._is_out = False  # the first round
        self._present: set[int] = set()
        self._missing: list[set[int]] = []
        self._next = 0  # buckets that have gone out in this round
        self._works: list[tuple[int, Any, Tensor]] = []
        self._late: list[tuple[int, Tensor]] = []
        self._source: Any = None
        self._lock = threading.RLock()

    def bind(self, source: Any) -> None:
        """`source` holds the sums: `CaughtGradients`."""
        self._source = source

    # During a backward.

    def begin(self) -> None:
        """A backward begins in the window's last micro step; the first one is reduced."""
        if not self._is_out and self.overlaps:
            self._open()

    def takes(self, row: int, grad: Tensor) -> bool:
        """Puts a gradient aside whose bucket has gone out already; False where it has not."""
        with self._lock:
            if self.buckets.slots[row].bucket >= self._next:
                return False
            self._late.append((row, grad))
            self._source.sums.repeated = True
            return True

    def arrive(self, row: int) -> None:
        """The row's gradient is in; launches buckets that are complete, in their order."""
        with self._lock:
            if not self.is_open:
                return
            self._present.add(row)
            self._missing[self.buckets.slots[row].bucket].discard(row)
            while self._next < len(self._missing) and not self._missing[self._next]:
                self._launch_next()

    def end(self) -> None:
        """The backward has ended: what has not gone out goes out as it is."""
        with self._lock:
            if not self.is_open:
                return
            while self._next < len(self.buckets.all):
                index = self._next
                self._source.take_rest(self._missing[index].copy())
                if self._next == index:  # else it went out with the last of them
                    self._missing[index].clear()
                    self._launch_next()
            self.is_open = False
            self._is_out = True

    # When the ranks meet.

    @property
    def num_rounds(self) -> int:
        """Rounds that this rank has run, or has gradients for."""
        return int(self._is_out) + bool(self._late)

    @property
    def is_complete(self) -> bool:
        """Every row got a gradient on this rank."""
        present = len(self._present) if self._is_out else self._source.sums.num_sums
        return bool(present == sum(p.requires_grad for p in self._source.params))

    def complete(self, num_rounds: int, what: str, *, is_complete: bool) -> None:
        """Runs the rounds that are left, and waits for all.

        Rows that got no gradient on any rank have none afterwards; all others have.

        Args:
            num_rounds: the most that any rank needs; one is run in any case.
            what: for the message when it fails.
            is_complete: every row got a gradient on every rank.
        """
        if not self._is_out:
            self._open()
            self.end()
        self._wait(what)
        if num_rounds > 1:
            self._run_second(what)
        if not is_complete:
            rows = range(len(self.buckets.slots))
            found = self.ranks.any([row in self._present for row in rows], what)
            self._source.sums.forget([row for row in rows if not found[row]])
            self._source.sums.adopt([row for row in rows if found[row]])

    def clear(self) -> None:
        """A new window."""
        self._wait("the end of a reduction")
        self.is_open = self._is_out = False
        self.num_collectives_before = self.num_collectives
        self._present.clear()
        self._next = 0
        self._late.clear()

    # Parts.

    def _open(self) -> None:
        self.is_open = True
        self._missing = [set(bucket.rows) for bucket in self.buckets.all]
        self._next = 0

    def _run_second(self, what: str) -> None:
        """Adds what waited to what all have; nothing goes out before all of it is in."""
        self._source.sums.adopt(range(len(self.buckets.slots)))  # so that it is added, not stored
        if self._scatters or self.ranks.rank != 0:
            for bucket in self.buckets.all:
                bucket.flat.zero_()
        late, self._late, self._next = self._late, [], 0
        for row, grad in late:
            self._present.add(row)
            self._source.add(row, grad)
        self._open()
        self.end()
        self._wait(what)

    def _wait(self, what: str) -> None:
        """Until every bucket that went out is back."""
        works, self._works = self._works, []
        for index, work, out in works:
            self.ranks.call(work.wait, what)
            if self._scatters and out is not self.shares[index]:
                self.shares[index] += out
        if works and not self._scatters:
            flats = [self.buckets.all[index].flat for index, _, _ in works]
            torch.autograd.graph.increment_version(flats)

    def _launch_next(self) -> None:
        index, self._next = self._next, self._next + 1
        bucket = self.buckets.all[index]
        self._source.flush()
        for row in () if self._is_out else bucket.rows:
            if self._source.sum(row) is not None:
                self._present.add(row)
            else:  # its memory still holds an earlier window's
                self.buckets.view(row).zero_()
        if not any(self._source.params[row].requires_grad for row in bucket.rows):
            return  # frozen, on every rank: the meeting sees to that
        launch, out = self._collective(index)
        work = self.ranks.call(launch, "a reduction")
        self._works.append((index, work, out))
        self.num_collectives += 1
        self.num_bytes += bucket.flat.nbytes

    def _collective(self, index: int) -> tuple[Callable[[], Any], Tensor]:
        flat, group = self.buckets.all[index].flat, self.ranks.sums
        if not self._scatters:
            return partial(dist.all_reduce, flat, group=group, async_op=True), flat
        out = torch.empty_like(self.shares[index]) if self._is_out else self.shares[index]
        return partial(reduce_scatter_single, out, flat, group=group, async_op=True), out

    def _make_share(self, index: int) -> Tensor:
        flat = self.buckets.all[index].flat
        return flat.new_zeros(flat.numel() // self.ranks.size)
