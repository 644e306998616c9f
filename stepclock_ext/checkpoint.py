"""Checkpoints: everything that a run needs to go on to the bit, in one file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch

from . import checkpoint_files
from .checkpoint_contents import check_model, check_optimizer, name_parts, to_plain
from .optimizer import ClockedOptimizer
from .random_state import RandomState

__all__ = ["Resume", "latest_checkpoint", "load_checkpoint", "save_checkpoint"]

T = TypeVar("T")


@dataclass(frozen=True)
class Resume:
    """Where a loaded run goes on.

    Attributes:
        path: the file.
        epoch: epochs ended.
        micro_steps_to_skip: position in the data of epoch `epoch`, counted from its beginning.
        extra: as given to `save_checkpoint`.
    """

    path: Path
    epoch: int
    micro_steps_to_skip: int
    extra: Any = None
    _random: RandomState | None = field(default=None, repr=False, compare=False)

    def remaining(self, loader: Iterable[T], *, epoch: int) -> Iterator[T]:
        """The micro batches that epoch `epoch` still has; in a later one than `self.epoch`, all.

        What is skipped is loaded and dropped. Random numbers that this takes are given back: they
        continue as they were at the save. The loader must give the epoch's batches in the same
        order again, so shuffle with a generator that is seeded for each epoch.

        Raises:
            ValueError: `epoch` is over, or the loader ends before the position.

        Example:
            >>> resume = Resume(Path("ckpt_step1.pt"), epoch=0, micro_steps_to_skip=3)
            >>> for epoch in range(resume.epoch, 2):
            ...     print([batch for batch in resume.remaining(range(5), epoch=epoch)])
            [3, 4]
            [0, 1, 2, 3, 4]
        """
        if epoch < self.epoch:
            raise ValueError(
                f"Resume.remaining: epoch must be {self.epoch} or more, got {epoch}; begin with "
                "resume.epoch"
            )
        batches = iter(loader)
        if epoch > self.epoch:
            return batches
        skipped = sum(1 for _ in islice(batches, self.micro_steps_to_skip))
        if skipped < self.micro_steps_to_skip:
            raise ValueError(
                f"Resume.remaining: the loader must have {self.micro_steps_to_skip} batches or "
                f"more, got {skipped}; build it on the data of the saved run"
            )
        if self._random is not None:
            self._random.restore()
        return batches


def save_checkpoint(
    folder: str | os.PathLike[str],
    *,
    model: torch.nn.Module,
    optimizer: ClockedOptimizer,
    metric: tuple[str, float] | None = None,
    save_total_limit: int | None = None,
    extra: Any = None,
) -> Path:
    """Writes model, optimizer, clock, random numbers and the position in the data to one file.

    After any micro step, also inside a window, whose accumulators go along. The file appears under
    its name when it is whole and on the disk; a crash before leaves the files before. Of several
    processes that hold the same model, one saves.

    Args:
        folder: gets ``ckpt_step1200.pt`` after 1200 updates; it is made where it is missing. Or
            the path of a file, which ends in ".pt".
        model: holds every parameter of `optimizer`.
        optimizer: its ``state_dict`` has clock, accumulators, loss scale and schedulers.
        metric: name and value for the file's name: ``ckpt_step1200_f1-0.863.pt``.
        save_total_limit: checkpoints of ours that stay in `folder`; those written first go.
        extra: given back by `load_checkpoint`; tensors, plain Python values, lists and dicts.

    Returns:
        The file.

    Raises:
        OSError: it cannot be written; what was there before is still there.
        RuntimeError: a backward has run that ``step()`` has not counted.
        TypeError: a value can be no part of a file that is safe to read; the message says where.
        ValueError: an argument is outside its range, or the optimizer has a parameter that `model`
            does not hold.

    Example:
        >>> import tempfile
        >>> model = torch.nn.Linear(2, 1)
        >>> opt = ClockedOptimizer(
        ...     torch.optim.SGD(model.parameters(), lr=0.1), gradient_accumulation_steps=2
        ... )
        >>> for _ in range(3):
        ...     opt.backward(model(torch.ones(2)).sum())
        ...     _ = opt.step()
        >>> path = save_checkpoint(tempfile.mkdtemp(), model=model, optimizer=opt, extra={"lr": 1})
        >>> path.name
        'ckpt_step1.pt'
        >>> resume = load_checkpoint(path.parent, model=model, optimizer=opt)
        >>> resume.micro_steps_to_skip, resume.extra, opt.clock.micro_step_in_window
        (3, {'lr': 1}, 1)
    """
    _check_optimizer_type("save_checkpoint", optimizer)
    limit = _check_limit(save_total_limit)
    path = Path(folder)
    is_file = path.suffix == ".pt"
    if is_file and (metric is not None or limit is not None):
        raise ValueError(
            "save_checkpoint: metric and save_total_limit must come with a folder, got the file "
            f"{path}; pass its folder, or leave them out"
        )
    if not is_file:
        path = path / checkpoint_files.file_name(optimizer.clock.update_step, metric)
    checkpoint_files.write(path, _contents(model, optimizer, extra))
    if limit is not None:
        checkpoint_files.remove_oldest(path.parent, limit=limit, keep=path)
    return path


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: torch.nn.Module,
    optimizer: ClockedOptimizer,
    remap: str | None = None,
    lr_scaling: str | None = None,
    scheduler_factory: Any = None,
) -> Resume:
    """Takes a run over from a file: the next micro step does what it would have done then.

    Everything is read and checked before anything changes.

    Args:
        path: the file, or a folder: then its checkpoint with the most updates.
        model: as at the save: the same names, shapes and dtypes.
        optimizer: as at the save: the same optimizers and groups, the parameters in the same order.
        remap: see ``ClockedOptimizer.load_state_dict``, as for the two that follow.

    Returns:
        The position in the data, and `extra`.

    Raises:
        OSError: the file cannot be read; FileNotFoundError where a folder has none.
        ValueError: it is cut short, damaged, of another program or version, or of another model or
            optimizer.
        RuntimeError: ``load_state_dict`` refuses the plan.
    """
    _check_optimizer_type("load_checkpoint", optimizer)
    path = _find(Path(path))
    saved = checkpoint_files.read(path)
    check_model(path, model, saved["model"])
    check_optimizer(path, name_parts(model, optimizer), saved)
    try:
        random = RandomState.from_state_dict(saved["random"])
    except ValueError as e:
        raise ValueError(f"load_checkpoint: {path} is damaged; {e}") from e
    options = {"remap": remap, "lr_scaling": lr_scaling, "scheduler_factory": scheduler_factory}
    given = {name: value for name, value in options.items() if value is not None}
    optimizer.load_state_dict(saved["optimizer"], **given)
    model.load_state_dict(saved["model"])
    optimizer._companions.settle_all()
    random.restore()
    clock = optimizer.clock
    return Resume(path, clock.epoch, clock.micro_step_in_epoch, saved["extra"], random)


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint in `folder` with the most updates (of several, the one written last), or None.

    Example:
        >>> latest_checkpoint("no such folder") is None
        True
    """
    found = checkpoint_files.list_checkpoints(Path(folder))
    return found[-1][2] if found else None


def _contents(model: torch.nn.Module, optimizer: ClockedOptimizer, extra: Any) -> dict[str, Any]:
    state = optimizer.state_dict()
    window = state["stepclock"]["window"]
    if window["broken"] or window["is_pending"] or optimizer._pass.accumulator.has_unseen():
        raise RuntimeError(
            "save_checkpoint: every backward must be counted as a micro step, got gradients that "
            "are not; call step() first, or discard()"
        )
    weights = model.state_dict()  # stays the dict it is: torch keeps versions of modules beside it
    for name, value in weights.items():
        weights[name] = to_plain(value, f"model, {name}")
    return {
        "model": weights,
        "optimizer": to_plain(state, "optimizer"),
        "names": name_parts(model, optimizer),
        "random": RandomState.capture().state_dict(),
        "extra": to_plain(extra, "extra"),
    }


def _find(path: Path) -> Path:
    if not path.is_dir():
        return path
    found = latest_checkpoint(path)
    if found is None:
        raise FileNotFoundError(
            f"load_checkpoint: the folder must hold a checkpoint, got no ckpt_step*.pt in {path}; "
            "pass another folder, or a file"
        )
    return found


def _check_limit(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"save_checkpoint: save_total_limit must be an integer, got {value!r}")
    if value < 1:
        raise ValueError(
            f"save_checkpoint: save_total_limit must be 1 or more, got {value}; pass None to keep "
            "every checkpoint"
        )
    return value


def _check_optimizer_type(where: str, optimizer: Any) -> None:
    if not isinstance(optimizer, ClockedOptimizer):
        raise TypeError(
            f"{where}: optimizer must be a ClockedOptimizer, got {type(optimizer).__name__}; wrap "
            "it in one"
        )
