"""Samples seen, as the updates of one plan and of another count them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .plan import TrainPlan

__all__ = ["Rhythm", "SampleMap"]


@dataclass(frozen=True)
class Rhythm:
    """How a plan cuts the data: pieces of one size, the last of an epoch takes what is left.

    A piece is a window. With tail="carry", where windows run on over the end of an epoch, it is a
    micro step, and a window has several.

    Args:
        samples_per_piece: of all ranks.
        pieces_per_update: pieces in a window.
        samples_per_epoch: the data, dropped samples included; None without a length.
        pieces_per_epoch: None without a length.
        drops_tail: what is left of an epoch belongs to no update.

    Example:
        >>> windows = Rhythm(4, 1, samples_per_epoch=7, pieces_per_epoch=2)
        >>> [windows.samples_at(piece) for piece in (1, 2, 3)], windows.piece_at(11)
        ([4, 7, 11], 3.0)
    """

    samples_per_piece: int
    pieces_per_update: int
    samples_per_epoch: int | None
    pieces_per_epoch: int | None
    drops_tail: bool = False

    @classmethod
    def of(cls, plan: TrainPlan) -> Rhythm:
        """The pieces of `plan`."""
        samples = plan.per_device_train_batch_size * plan.world_size
        size = plan.gradient_accumulation_steps
        if plan.dataset_size is not None and plan.tail == "carry":
            return cls(samples, size, plan.dataset_size, plan.micro_steps_per_epoch)
        window, drops = samples * size, plan.tail == "drop"
        return cls(window, 1, plan.dataset_size, plan.updates_per_epoch, drops_tail=drops)

    def samples_at(self, piece: float) -> float:
        """Samples from the start of an epoch to the end of `piece`; a fraction lies inside one."""
        if self.samples_per_epoch is None or self.pieces_per_epoch is None:
            return piece * self.samples_per_piece
        epoch, rest = divmod(piece, self.pieces_per_epoch)
        last = (self.pieces_per_epoch - 1) * self.samples_per_piece
        inside = rest * self.samples_per_piece
        if inside > last:
            inside = last + (rest - self.pieces_per_epoch + 1) * (self.samples_per_epoch - last)
        return epoch * self.samples_per_epoch + inside

    def piece_at(self, samples: float) -> float:
        """The piece that ends at `samples`; the inverse of `samples_at`."""
        if self.samples_per_epoch is None or self.pieces_per_epoch is None:
            return samples / self.samples_per_piece
        epoch, rest = divmod(samples, self.samples_per_epoch)
        last = (self.pieces_per_epoch - 1) * self.samples_per_piece
        inside = rest / self.samples_per_piece
        if self.drops_tail:
            inside = min(inside, self.pieces_per_epoch)
        elif rest > last:
            inside = self.pieces_per_epoch - 1 + (rest - last) / (self.samples_per_epoch - last)
        return epoch * self.pieces_per_epoch + inside


@dataclass(frozen=True, kw_only=True)
class SampleMap:
    """From updates after a resume to the share of the old curve's rest, by samples seen.

    Args:
        old, new: the pieces of the two plans.
        start: samples seen where the window that is open, or comes next, began to count, as the new
            plan's windows have it.
        epoch_end: samples at the end of the epoch of the resume.
        first_pieces: pieces of the new plan that are left in that epoch.
        open_pieces: pieces of the open window that are done, where a piece is a micro step.
        shift: what is added to make them samples as the old plan counts them (its epochs may have
            another length).
        anchor, end: the share is 0 and 1 at these updates of the old plan.
    """

    old: Rhythm
    new: Rhythm
    start: float
    epoch_end: float
    first_pieces: int
    open_pieces: int
    shift: float
    anchor: float
    end: float

    def __post_init__(self) -> None:
        for name in ("old", "new"):
            value: Any = getattr(self, name)
            if isinstance(value, Mapping):
                object.__setattr__(self, name, Rhythm(**value))

    def samples_after(self, updates: float) -> float:
        """Samples seen when `updates` of the new plan have been made since the resume."""
        pieces = updates * self.new.pieces_per_update - self.open_pieces
        inside = self.start + pieces * self.new.samples_per_piece
        if self.new.samples_per_epoch is None:
            return inside
        if pieces < self.first_pieces:
            return min(inside, self.epoch_end)
        return self.epoch_end + self.new.samples_at(pieces - self.first_pieces)

    def share(self, updates: float) -> float:
        """The share of the old curve's rest that is done after `updates`: from 0 to 1."""
        if updates < 1:
            return updates * self.share(1) if updates else 0.0
        if not self.anchor < self.end:
            return 1.0
        old = self.old.piece_at(self.samples_after(updates) + self.shift)
        share = (old / self.old.pieces_per_update - self.anchor) / (self.end - self.anchor)
        return min(1.0, max(0.0, share))
