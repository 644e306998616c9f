"""The sizes of the tensors that ops walk together, and how they are cut into chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .contract import Backend

__all__ = [
    "CHUNK_ELEMENTS",
    "HALVES",
    "Layout",
    "chunk_sizes",
    "is_dense",
    "num_chunks",
    "num_real",
    "real_dtype",
    "real_view",
]

# A chunk owns one slot of the window's sums. Fixed, since sums are added chunk by chunk: another
# size would be other bits. 16384 fp32 values are 64 KiB, some 20 microseconds of work for a core.
CHUNK_ELEMENTS = 16384


HALVES = (torch.bfloat16, torch.float16)
_STATE_COLUMNS = ("EXP_AVG", "EXP_AVG_SQ", "MAX_EXP_AVG_SQ", "BUFFER")
_UP_TO_FP32 = (*HALVES, torch.float32)


def num_chunks(num_elements: int) -> int:
    """Chunks that a tensor of `num_elements` elements is cut into.

    >>> [num_chunks(n) for n in (0, 1, 16384, 16385, 2_476_250_368)]
    [0, 1, 1, 2, 151139]
    """
    return -(-num_elements // CHUNK_ELEMENTS)


def chunk_sizes(num_elements: int) -> list[int]:
    """Elements of each chunk; they add up to `num_elements`."""
    full, rest = divmod(num_elements, CHUNK_ELEMENTS)
    return [CHUNK_ELEMENTS] * full + [rest] * (rest > 0)


def num_real(tensor: Tensor) -> int:
    """Real numbers in `tensor`: a complex element is two."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


_REAL_DTYPES = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the numbers that `dtype` is made of."""
    return _REAL_DTYPES.get(dtype, dtype)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one block of memory, each address once, in whatever order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def real_view(tensor: Tensor) -> Tensor:
    """`tensor`, or the real numbers behind a complex one, with a last dimension of two."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


@dataclass(frozen=True, eq=False)
class Layout:
    """The sizes of a list of tensors that ops walk together, one row a tensor.

    Every list handed to an op with this layout has, row by row, these sizes, dtypes and strides.

    Attributes:
        backend: runs the ops on this layout.
        num_elements: real numbers in each row (twice the elements of a complex tensor).
        dtypes: of those numbers, in parameters and micro gradients.
        strides: of each row's tensors; None where the row is contiguous.
        first_slots: where each row's chunk sums begin in the window's slots.
        accumulator_dtypes: of the window sums in each row: as `dtypes`, or fp32 beside 16 bits.
        state_dtypes: of moments and buffer in each row: any up to fp32, or fp64 beside fp64.
        verified: the list that was last found to fit, for each column.
        cache: what the backend keeps beside the layout (address tables).
    """

    backend: Backend
    num_elements: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    strides: tuple[tuple[int, ...] | None, ...]
    first_slots: tuple[int, ...]
    accumulator_dtypes: tuple[torch.dtype, ...]
    state_dtypes: list[torch.dtype] = field(default_factory=list)
    verified: dict[str, Sequence[Tensor]] = field(default_factory=dict)
    cache: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(
        backend: Backend,
        tensors: Sequence[Tensor],
        first_slots: Sequence[int] | None = None,
        *,
        accumulate_dtype: torch.dtype | None = None,
    ) -> Layout:
        """The layout of `tensors`.

        Args:
            backend: runs the ops.
            tensors: parameters, or tensors like them.
            first_slots: where each row's slots begin; None puts them one after another.
            accumulate_dtype: fp32 for window sums that are fp32 beside 16-bit rows; None leaves
                them in each row's dtype.
        """
        sizes = [num_real(t) for t in tensors]
        if first_slots is None:
            first_slots = [0, *accumulate(num_chunks(size) for size in sizes)][:-1]
        wide = accumulate_dtype == torch.float32
        return Layout(
            backend=backend,
            num_elements=tuple(sizes),
            dtypes=tuple(real_dtype(t.dtype) for t in tensors),
            strides=tuple(None if t.is_contiguous() else t.stride() for t in tensors),
            first_slots=tuple(first_slots),
            accumulator_dtypes=tuple(
                torch.float32 if wide and t.dtype in HALVES else real_dtype(t.dtype)
                for t in tensors
            ),
            state_dtypes=[real_dtype(t.dtype) for t in tensors],
        )

    @property
    def num_slots(self) -> int:
        """Slots up to and including the last one that a row of this layout writes."""
        ends = (
            first + num_chunks(size)
            for first, size in zip(self.first_slots, self.num_elements, strict=True)
        )
        return max(ends, default=0)

    def adopt_state_dtypes(self, states: Sequence[Tensor]) -> None:
        """Takes the dtypes of `states`, one of the state columns, for all of them.

        Where a row's state has a dtype that cannot stand beside the row's, the row keeps what it
        had, and `check` will refuse the column.
        """
        dtypes = [real_dtype(state.dtype) for state in states]
        found = [
            dtype if own in _UP_TO_FP32 and dtype in _UP_TO_FP32 else own
            for dtype, own in zip(dtypes, self.dtypes, strict=True)
        ]
        if found != self.state_dtypes:
            self.release(*_STATE_COLUMNS)
            self.cache.pop("dtypes_sent", None)
            self.state_dtypes[:] = found

    def dtype(self, column: str, row: int) -> torch.dtype:
        """What the tensors of `column` are made of in a row."""
        own = self.dtypes[row]
        if column in _STATE_COLUMNS:
            return self.state_dtypes[row]
        if column == "ACCUMULATOR":
            return self.accumulator_dtypes[row]
        if column == "MASTER" and own == torch.bfloat16:
            return torch.int16
        return torch.float32 if column in ("MASTER", "AVERAGE") and own in HALVES else own

    def verify(self, column: str, tensors: Sequence[Tensor]) -> None:
        """Checks `tensors`; the same list only once where the backend sees if one of them moves.

        Raises:
            TypeError: a tensor has another size or dtype than its row.
            ValueError: another number of tensors, or other strides.
        """
        if self.verified.get(column) is not tensors or not self.backend.watches_addresses:
            self.check(column, tensors)
            self.verified[column] = tensors

    def release(self, *columns: str) -> None:
        """Lets go of the tensors of `columns`, so that their memory can be freed."""
        for column in columns:
            self.verified.pop(column, None)
        self.backend.release(self, columns)

    def check(self, column: str, tensors: Sequence[Tensor]) -> None:
        """As `verify`, always."""
        if len(tensors) != len(self.num_elements):
            raise ValueError(
                f"{column}: must be {len(self.num_elements)} tensors, got {len(tensors)}"
            )
        for row, tensor in enumerate(tensors):
            where = f"{column} {row}"
            if column == "STEP":
                _check_step(where, tensor, self.backend)
                continue
            size, strides = self.num_elements[row], self.strides[row]
            dtype = self.dtype(column, row)
            if num_real(tensor) != size or real_dtype(tensor.dtype) != dtype:
                raise TypeError(
                    f"{where}: must hold {size} values of {dtype}, got {tuple(tensor.shape)} "
                    f"{tensor.dtype}"
                )
            if not (tensor.is_contiguous() if strides is None else tensor.stride() == strides):
                raise ValueError(
                    f"{where}: strides must be {strides or 'contiguous'}, got {tensor.stride()}"
                )
            # A remainder is taken where a parameter of its size would be.
            like = tensor.view(torch.bfloat16) if dtype == torch.int16 else tensor
            if not self.backend.supports(like):
                raise TypeError(
                    f"{where}: backend {self.backend.name!r} cannot take {tensor.device}"
                )


def _check_step(where: str, step: Tensor, backend: Backend) -> None:
    if backend.device.type != "cpu" and step.device != backend.device:
        raise TypeError(f"{where}: must be on {backend.device}, got {step.device}")
    if step.dtype != torch.float32 or step.numel() != 1:
        raise TypeError(f"{where}: must be one fp32 value, got {tuple(step.shape)} {step.dtype}")
