"""Checkpoints: everything that a run needs to go on to the bit, in one file or folder."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import checkpoint_files, sharded_checkpoint
from .checkpoint_contents import (
    bare_model,
    check_model,
    check_optimizer,
    name_parts,
    owner_of,
    spread_weights,
    to_plain,
)
from .checkpoint_ranks import JointSteps
from .checkpoint_resume import Resume
from .dtensors import is_dtensor
from .optimizer import ClockedOptimizer
from .random_state import RandomState
from .ranks import Ranks

__all__ = ["Resume", "latest_checkpoint", "load_checkpoint", "save_checkpoint"]


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
    its name when it is whole and on the disk; a crash before leaves the files before.

    Where `optimizer` trains with other processes, every rank calls this, after an update. Rank 0
    writes the file, with the random numbers of every rank, and all return when it is there. Under
    FSDP2 all write, into a folder that is named as the file, without its ".pt".

    Args:
        folder: gets ``ckpt_step1200.pt`` after 1200 updates; it is made where it is missing. Or
            the path of a file, which ends in ".pt".
        model: holds every parameter of `optimizer`; inside DDP, or without it.
        optimizer: its ``state_dict`` has clock, accumulators, loss scale and schedulers.
        metric: name and value for the file's name: ``ckpt_step1200_f1-0.863.pt``.
        save_total_limit: checkpoints of ours that stay in `folder`; those written first go.
        extra: given back by `load_checkpoint`; tensors, plain Python values, lists and dicts. Of
            several processes that of rank 0 is saved.

    Returns:
        The file, or the folder.

    Raises:
        OSError: it cannot be written; what was there before is still there.
        RuntimeError: a backward has run that ``step()`` has not counted; with other processes, a
            window is open, or not every rank is here.
        TypeError: a value can be no part of a file that is safe to read; the message says where.
        ValueError: an argument is outside its range, or the optimizer has a parameter that `model`
            does not hold, or ranks save different checkpoints.

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
    steps, model = JointSteps("save_checkpoint", _ranks_of(optimizer)), bare_model(model)
    what = f"save_checkpoint after update {optimizer.clock.update_step}"

    def prepare() -> tuple[Path, int | None, Any]:
        _refuse_halves(optimizer)
        is_spread = any(map(is_dtensor, model.state_dict().values()))
        path, limit = _check_target(Path(folder), optimizer, metric, save_total_limit, is_spread)
        return path, limit, to_plain(extra, "extra")

    path, limit, kept = steps.take(what, prepare)
    token = steps.agree_on(path.name)
    random = steps.gather(RandomState.capture().state_dict(), what)
    content = {"extra": kept, "random": random[0], "random_of_others": random[1:]}
    parts, spread = steps.take(what, lambda: _parts(model, optimizer))
    content.update(parts)
    if path.suffix == ".pt":
        steps.take_first(what, lambda: checkpoint_files.write(path, content))
    else:
        sharded_checkpoint.write(path, content, spread, steps, token)
    if limit is not None:
        steps.take_first(
            what, lambda: checkpoint_files.remove_oldest(path.parent, limit=limit, keep=path)
        )
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

    Everything is read and checked before anything changes. Where `optimizer` trains with other
    processes, every rank calls this. Who saved does not matter: one process, several, or FSDP2 on
    another mesh; a rank that was not there at the save keeps its random numbers, with a warning.

    Args:
        path: the file or folder, or one that holds some: then its checkpoint with the most updates.
        model: as at the save: the same names, shapes and dtypes; inside DDP, or without it.
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
    steps, model = JointSteps("load_checkpoint", _ranks_of(optimizer)), bare_model(model)

    def read() -> tuple[Path, dict[str, Any], RandomState | None]:
        found = _find(Path(path))
        saved = _read(found, model, optimizer)
        return found, saved, _random_of(steps.rank, found, saved)

    found, saved, random = steps.take(f"load_checkpoint of {path}", read)
    steps.agree_on(found.name)
    options = {"remap": remap, "lr_scaling": lr_scaling, "scheduler_factory": scheduler_factory}
    given = {name: value for name, value in options.items() if value is not None}
    optimizer.load_state_dict(saved["optimizer"], **given)
    model.load_state_dict(saved["model"])
    optimizer._companions.settle_all()
    if random is None:
        warnings.warn(
            f"load_checkpoint: {found} has random numbers of {1 + len(saved['random_of_others'])} "
            f"ranks, none for rank {steps.rank}, which keeps its own",
            stacklevel=2,
        )
    else:
        random.restore()
    clock, begun = optimizer.clock, random or RandomState.capture()
    return Resume(found, clock.epoch, clock.micro_step_in_epoch, saved["extra"], begun)


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint in `folder` with the most updates (of several, the one written last), or None.

    Example:
        >>> latest_checkpoint("no such folder") is None
        True
    """
    found = checkpoint_files.list_checkpoints(Path(folder))
    return found[-1][2] if found else None


def _ranks_of(optimizer: ClockedOptimizer) -> Ranks | None:
    return None if optimizer._processes is None else optimizer._processes.ranks


def _refuse_halves(optimizer: ClockedOptimizer) -> None:
    """Refuses to save half of a micro step, and a window that lies in several processes."""
    num_open, ranks = optimizer.clock.micro_step_in_window, _ranks_of(optimizer)
    window = optimizer._window
    if window.broken or window.is_pending or optimizer._pass.accumulator.has_unseen():
        raise RuntimeError(
            "save_checkpoint: every backward must be counted as a micro step, got gradients that "
            "are not; call step() first, or discard()"
        )
    if num_open and ranks is not None and ranks.size > 1:
        raise RuntimeError(
            f"save_checkpoint: with several processes a window must be over, got {num_open} micro "
            f"steps in one that lies in all {ranks.size} of them; save after an update"
        )


def _check_target(
    folder: Path,
    optimizer: ClockedOptimizer,
    metric: tuple[str, float] | None,
    save_total_limit: Any,
    is_spread: bool,
) -> tuple[Path, int | None]:
    """The path of the checkpoint, and how many may stay."""
    limit = _check_limit(save_total_limit)
    if folder.suffix != ".pt":
        name = checkpoint_files.file_name(optimizer.clock.update_step, metric)
        return folder / (name.removesuffix(".pt") if is_spread else name), limit
    if metric is not None or limit is not None:
        raise ValueError(
            "save_checkpoint: metric and save_total_limit must come with a folder, got the file "
            f"{folder}; pass its folder, or leave them out"
        )
    if is_spread:
        raise ValueError(
            "save_checkpoint: parameters that are spread over processes must be saved to a folder, "
            f"got the file {folder}; pass its folder"
        )
    return folder, limit


def _parts(
    model: torch.nn.Module, optimizer: ClockedOptimizer
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Weights, state and names in plain types, and the spread tensors apart."""
    state = optimizer.state_dict()
    whole = {"model": model.state_dict(), "optimizer": state}
    parts, spread = sharded_checkpoint.split(whole)
    weights = parts["model"]  # stays the dict it is: torch keeps versions of modules beside it
    for name, value in weights.items():
        weights[name] = to_plain(value, f"model, {name}")
    plain = {"model": weights, "optimizer": to_plain(parts["optimizer"], "optimizer")}
    return {**plain, "names": name_parts(model, optimizer)}, spread


def _read(path: Path, model: torch.nn.Module, optimizer: ClockedOptimizer) -> dict[str, Any]:
    """The content of a checkpoint, found to be of this model and optimizer, spread as they are."""
    saved, here = checkpoint_files.read(path), model.state_dict()
    check_model(path, here, saved["model"])
    check_optimizer(path, name_parts(model, optimizer), saved)
    if path.is_dir():
        saved = sharded_checkpoint.fill(path, saved, owner_of(here, optimizer))
    return {**saved, "model": spread_weights(here, saved["model"])}


def _random_of(rank: int, path: Path, saved: dict[str, Any]) -> RandomState | None:
    """What this rank's generators were; None where it was not there."""
    states = [saved["random"], *saved.setdefault("random_of_others", [])]
    try:
        return RandomState.from_state_dict(states[rank]) if rank < len(states) else None
    except ValueError as e:
        raise ValueError(f"load_checkpoint: {path} is damaged; {e}") from e


def _find(path: Path) -> Path:
    if not path.is_dir() or checkpoint_files.is_folder(path):
        return path
    found = latest_checkpoint(path)
    if found is None:
        raise FileNotFoundError(
            f"load_checkpoint: the folder must hold a checkpoint, got no ckpt_step* in {path}; "
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
