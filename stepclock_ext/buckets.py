"""Window sums in flat buffers that a collective takes as they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Bucket", "Buckets", "Slot"]

# Elements that a row, and a process's share, is padded to: 256 bytes of fp32, for wide loads.
_ALIGN = 64
_FIRST_BYTES = 2**20  # the first bucket is small, so that the wire is busy soon (as DDP does)


@dataclass(frozen=True)
class Slot:
    """Where a row lies: `offset` and `numel` count real numbers."""

    bucket: int
    offset: int
    numel: int


@dataclass(frozen=True, eq=False)
class Bucket:
    """Some rows, one after another, in one flat buffer.

    Attributes:
        rows: in the order of the buffer.
        flat: their sums; gaps are zero.
    """

    rows: tuple[int, ...]
    flat: Tensor

    def share(self, rank: int, num_ranks: int) -> slice:
        """The elements that a process owns: equal shares, whatever rows they cut."""
        size = self.flat.numel() // num_ranks
        return slice(rank * size, (rank + 1) * size)


class Buckets:
    """The sums of all rows, in the order in which their gradients arrive.

    Args:
        params: one a row.
        dtypes: of the sums; a complex one is two real numbers here.
        bucket_bytes: a bucket that has reached this is closed; the first one at 1 MiB already.
        num_ranks: each bucket is padded to equal shares of so many.
        order: of the rows; without it, from the last to the first.

    Example:
        >>> params = [torch.zeros(3), torch.zeros(2, 2)]
        >>> buckets = Buckets(params, [torch.float32] * 2, bucket_bytes=1 << 20)
        >>> [bucket.rows for bucket in buckets.all], buckets.all[0].flat.numel()
        ([(1, 0)], 128)
        >>> buckets.view(1).shape
        torch.Size([2, 2])
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        dtypes: Sequence[torch.dtype],
        *,
        bucket_bytes: int,
        num_ranks: int = 1,
        order: Sequence[int] | None = None,
    ) -> None:
        self._order = list(reversed(range(len(params)))) if order is None else list(order)
        self._params = params
        self._dtypes = list(dtypes)
        self.slots: list[Slot] = [Slot(0, 0, 0)] * len(params)
        self.all: list[Bucket] = []
        for rows in self._group(bucket_bytes):
            self.all.append(self._allocate(rows, len(self.all), _ALIGN * num_ranks))
        self._views = [self._make_view(row) for row in range(len(params))]

    def view(self, row: int) -> Tensor:
        """The memory of a row's sum, shaped and strided as its parameter."""
        return self._views[row]

    @property
    def num_bytes(self) -> int:
        """Of all buffers: what a collective is handed in one round."""
        return sum(bucket.flat.nbytes for bucket in self.all)

    def _group(self, bucket_bytes: int) -> Iterable[tuple[int, ...]]:
        """Rows of each bucket: alike in dtypes, device and being trained; closed when full."""
        open_rows: dict[tuple[torch.dtype, torch.dtype, torch.device, bool], list[int]] = {}
        sizes: dict[tuple[torch.dtype, torch.dtype, torch.device, bool], int] = {}
        has_first = False
        for row in self._order:
            p = self._params[row]
            key = (_real(self._dtypes[row]), p.dtype, p.device, p.requires_grad)
            open_rows.setdefault(key, []).append(row)
            sizes[key] = sizes.get(key, 0) + self._num_real(row) * key[0].itemsize
            if sizes[key] >= (bucket_bytes if has_first else min(bucket_bytes, _FIRST_BYTES)):
                has_first = True
                yield tuple(open_rows.pop(key))
                del sizes[key]
        yield from map(tuple, open_rows.values())  # among them, what is frozen

    def _allocate(self, rows: tuple[int, ...], index: int, align: int) -> Bucket:
        end = 0
        for row in rows:
            self.slots[row] = Slot(index, end, self._num_real(row))
            end += _padded(self._num_real(row), _ALIGN)
        first = rows[0]
        flat = torch.zeros(
            _padded(end, align), dtype=_real(self._dtypes[first]), device=self._params[first].device
        )
        return Bucket(rows, flat)

    def _num_real(self, row: int) -> int:
        return self._params[row].numel() * (2 if self._dtypes[row].is_complex else 1)

    def _make_view(self, row: int) -> Tensor:
        slot, p = self.slots[row], self._params[row]
        part = self.all[slot.bucket].flat[slot.offset : slot.offset + slot.numel]
        if self._dtypes[row].is_complex:
            part = torch.view_as_complex(part.view(-1, 2))
        strides = torch.empty_like(p, device="meta").stride()  # without holes, if `p` has some
        return part.as_strided(p.shape, strides)


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _padded(size: int, align: int) -> int:
    return -(-size // align) * align
