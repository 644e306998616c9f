"""Our own reduction: each bucket of window sums goes out as soon as its gradients are in.

By default buckets are all-reduced, in fp32 where gradients have 16 bits. With sharded states they
are reduce-scattered: each process gets the sum of its share.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .buckets import Buckets
from .collectives import reduce_scatter_single
from .ranks import Ranks

__all__ = ["BucketReduction"]


class BucketReduction:
    """Sums of a window over all ranks, in rounds.

    One backward of a window's last micro step is a round: every bucket is reduced once, in the same
    order on every rank. A rank that ran none, or fewer than another (no items, an ended loader, two
    backwards in a micro step), runs the missing ones when the ranks meet. Rounds add up::

        round 1:  sum over ranks of what each has gathered
        round n:  rank 0 keeps the result, the others begin at 0 again, and gradients that came
                  since are added

    Args:
        buckets: the sums.
        ranks: who takes part.
        scatters: each rank gets its share alone.

    Attributes:
        is_averaged: False; what comes out is a sum.
        is_open: the backward that runs is the window's last: what arrives is reduced.
        num_rounds: rounds of this window, launched as a whole.
        present: rows that got a gradient on this rank, as far as they have gone out.
        num_collectives: launched so far; it only grows, as does `num_bytes` handed to them.
    """

    is_averaged = False

    def __init__(self, buckets: Buckets, ranks: Ranks, *, scatters: bool = False) -> None:
        self.buckets = buckets
        self.ranks = ranks
        self.is_open = False
        self.num_rounds = 0
        self.present: set[int] = set()
        self.num_collectives = 0
        self.num_bytes = 0
        self._scatters = scatters
        self.shares = [self._make_share(b) for b in range(len(buckets.all))] if scatters else []
        self._missing: list[set[int]] = []
        self._next = 0  # buckets that have gone out in this round
        self._works: list[tuple[int, Any, Tensor]] = []
        self._late: list[tuple[int, Tensor]] = []
        self._source: Any = None
        self._lock = threading.RLock()

    def bind(self, source: Any) -> None:
        """`source` holds the sums: `CaughtGradients`."""
        self._source = source

    # A round.

    def begin(self) -> None:
        """A backward begins whose gradients are this window's last."""
        if self.num_rounds:
            self.wait()
            self._keep_once()
        self.is_open = True
        self._missing = [set(bucket.rows) for bucket in self.buckets.all]
        self._next = 0

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
            self.present.add(row)
            self._missing[self.buckets.slots[row].bucket].discard(row)
            while self._next < len(self._missing) and not self._missing[self._next]:
                self._launch()

    def end(self) -> None:
        """The backward has ended: what has not gone out goes out as it is."""
        with self._lock:
            while self._next < len(self.buckets.all):
                self._launch()
            self.is_open = False
            self.num_rounds += 1
        self.settle()

    def settle(self) -> None:
        """Reduces what came too late for its bucket: a second gradient, or a plain backward's."""
        late, self._late = self._late, []
        if late:
            self.begin()
            for row, grad in late:
                self._source.add(row, grad)
            self.end()

    @property
    def is_complete(self) -> bool:
        """Every row got a gradient on this rank."""
        if self.num_rounds:
            return len(self.present) == len(self.buckets.slots)
        return bool(self._source.sums.has_all())

    def complete(self, num_rounds: int, what: str, *, is_complete: bool) -> None:
        """Runs the rounds that others ran and this rank did not, and waits for all.

        Rows that got no gradient on any rank have none afterwards; all others have.

        Args:
            num_rounds: the most that any rank ran; at least one is run.
            what: for the message when it fails.
            is_complete: every row got a gradient on every rank.
        """
        while self.num_rounds < max(1, num_rounds):
            self.begin()
            self.end()
        self.wait(what)
        rows = range(len(self.buckets.slots))
        if not is_complete:
            found = self.ranks.any([row in self.present for row in rows], what)
            self._source.sums.forget([row for row in rows if not found[row]])
            self._source.sums.adopt([row for row in rows if found[row]])

    def wait(self, what: str = "the end of a reduction") -> None:
        """Until every bucket that went out is back."""
        works, self._works = self._works, []
        for index, work, out in works:
            self.ranks.call(work.wait, what)
            if self._scatters:
                self.shares[index] += out
        if works and not self._scatters:
            flats = [self.buckets.all[index].flat for index, _, _ in works]
            torch.autograd.graph.increment_version(flats)

    def clear(self) -> None:
        """A new window."""
        self.wait()
        self.is_open = False
        self.num_rounds = 0
        self.present.clear()
        self._next = 0
        self._late.clear()
        for share in self.shares:
            share.zero_()

    # Parts.

    def _keep_once(self) -> None:
        """Of a result that every rank has, the next round must count one."""
        self._source.sums.adopt(
            range(len(self.buckets.slots))
        )  # what comes now is added, not stored
        if self._scatters or self.ranks.rank != 0:
            for bucket in self.buckets.all:
                bucket.flat.zero_()

    def _launch(self) -> None:
        index, self._next = self._next, self._next + 1
        bucket = self.buckets.all[index]
        self._source.flush()
        for row in bucket.rows if self.num_rounds == 0 else ():
            if self._source.sum(row) is not None:
                self.present.add(row)
            else:  # its memory still holds an earlier window's
                self.buckets.view(row).zero_()
        launch, out = self._collective(bucket.flat)
        work = self.ranks.call(launch, "a reduction")
        self._works.append((index, work, out))
        self.num_collectives += 1
        self.num_bytes += bucket.flat.nbytes

    def _collective(self, flat: Tensor) -> tuple[Callable[[], Any], Tensor]:
        group = self.ranks.group
        if not self._scatters:
            return (lambda: dist.all_reduce(flat, group=group, async_op=True)), flat
        out = flat.new_empty(flat.numel() // self.ranks.size)
        return (lambda: reduce_scatter_single(out, flat, group=group, async_op=True)), out

    def _make_share(self, index: int) -> Tensor:
        flat = self.buckets.all[index].flat
        return flat.new_zeros(flat.numel() // self.ranks.size)
