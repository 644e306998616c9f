"""Checkpoints of parameters that are spread over processes: a folder that all of them write.

``torch.distributed.checkpoint`` writes the tensors that are spread, each process its part. All else
is the skeleton, a file like any checkpoint, where a tensor of the device "meta" stands for each of
them; it also says where their pieces lie. DCP's own ``.metadata`` is for other programs: it is
pickled, and we do not read it.
"""

from __future__ import annotations

import copy
import io
import os
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import checkpoint_files
from .checkpoint_ranks import JointSteps
from .dtensors import is_dtensor, like_parameter, local_part

__all__ = ["fill", "split", "write"]

# Of the skeleton, what may hold spread tensors; they are named by the way to them from here.
_PARTS = ("model", "optimizer")
Way = tuple[Any, ...]
OwnerOf = Callable[[Way], Tensor | None]


def split(content: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The skeleton of a checkpoint's content, and its spread tensors by name."""
    found: dict[str, Tensor] = {}

    def take_out(at: Way, tensor: Tensor) -> Tensor:
        if not is_dtensor(tensor):
            return tensor
        assert _name(at) not in found
        found[_name(at)] = tensor.detach()
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    parts = {part: _replaced(content[part], (part,), take_out) for part in _PARTS}
    return {**content, **parts}, found


def write(
    path: Path, skeleton: dict[str, Any], spread: dict[str, Tensor], steps: JointSteps, token: str
) -> None:
    """Makes `path` a folder of them. Collective; until it is whole, nothing changes there.

    Args:
        path: a folder that all ranks see.
        skeleton, spread: as `split` gave them; of rank 0 the skeleton counts.
        steps: the ranks.
        token: the same word on all of them.

    Raises:
        OSError: it cannot be written; what was at `path` is still there.
    """
    what = f"the saving of {path.name}"
    temporary = path.with_name(f".{path.name}.{token}.tmp")
    with ExitStack() as stack:
        folder = checkpoint_files.appearing_folder(temporary)
        _take_writing(path, what, steps, lambda: stack.enter_context(folder))
        pieces = _save_tensors(path, temporary, spread, steps)

        def finish() -> None:
            _check_pieces(temporary, pieces)
            placements = {name: _dims(tensor) for name, tensor in spread.items()}
            content = {**skeleton, "pieces": pieces, "placements": placements}
            checkpoint_files.write_file(temporary / checkpoint_files.SKELETON, content)
            checkpoint_files.publish_folder(temporary, path)

        _take_writing(path, what, steps, finish)


def fill(path: Path, skeleton: dict[str, Any], owner_of: OwnerOf) -> dict[str, Any]:
    """The whole content of a folder: spread tensors as this process needs them. Not collective.

    Args:
        path: the folder.
        skeleton: as read from it.
        owner_of: the parameter or weight here that a tensor belongs to; where that one is spread,
            the tensor is spread like it, else it is whole, on the CPU. Its dtype is the saved one.

    Raises:
        OSError: a file cannot be opened.
        ValueError: one is damaged.
    """
    targets: dict[str, Tensor] = {}

    def make_room(at: Way, tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        name = _name(at)
        targets[name] = _room_for(tensor, owner_of(at), skeleton["placements"].get(name, []))
        return targets[name]

    try:
        parts = {part: _replaced(skeleton[part], (part,), make_room) for part in _PARTS}
        _read_tensors(path, skeleton, targets)
    except (zipfile.BadZipFile, *checkpoint_files.UNREADABLE) as e:
        reason = str(e).splitlines() or [""]
        raise checkpoint_files.unreadable(path, f"{type(e).__name__}: {reason[0][:200]}") from e
    return {**skeleton, **parts}


def _name(at: Way) -> str:
    return "/".join(map(str, at))


def _replaced(value: Any, at: Way, change: Callable[[Way, Tensor], Tensor]) -> Any:
    """`value` with every tensor in it changed; containers are copied, with what they carry."""
    if isinstance(value, Tensor):
        return change(at, value)
    if isinstance(value, dict):
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = _replaced(item, (*at, key), change)
        return copied
    if type(value) in (list, tuple):
        return type(value)(_replaced(item, (*at, i), change) for i, item in enumerate(value))
    return value


def _dims(tensor: Any) -> list[int | None]:
    """Which dimension of a spread tensor each dimension of the mesh cuts; None for none."""
    from torch.distributed.tensor import Shard

    return [p.dim if type(p) is Shard else None for p in tensor.placements]


# Writing.


def _take_writing(path: Path, what: str, steps: JointSteps, step: Callable[[], None]) -> None:
    def first() -> None:
        try:
            step()
        except OSError as e:
            raise _unwritable(path, e.strerror or str(e), e.errno) from e

    steps.take_first(what, first)


def _unwritable(path: Path, reason: str, code: int | None = None) -> OSError:
    said = (
        f"save_checkpoint: {path} must be a folder that can be written, got {reason}; make room, "
        "or pass another folder"
    )
    return OSError(said) if code is None else OSError(code, said)


def _save_tensors(
    path: Path, temporary: Path, spread: dict[str, Tensor], steps: JointSteps
) -> dict[str, list[dict[str, Any]]]:
    """Every rank writes its part. Returns where the pieces of each tensor lie."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    ranks = steps.ranks
    assert ranks is not None  # where tensors are spread, there are ranks
    writer = FileSystemWriter(temporary)
    try:
        metadata = ranks.call(
            lambda: save(dict(spread), storage_writer=writer, process_group=ranks.control),
            f"the saving of {path.name}",
        )
    except CheckpointException as e:
        rank, (error, _) = next(iter(e.failures.items()))
        raise _unwritable(path, f"{error} on rank {rank}", getattr(error, "errno", None)) from e
    return _pieces(metadata)


def _pieces(metadata: Any) -> dict[str, list[dict[str, Any]]]:
    """What DCP says of the files, in plain values."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in metadata.state_dict_metadata}
    sizes = {
        (name, tuple(chunk.offsets)): tuple(chunk.sizes)
        for name, tensor in metadata.state_dict_metadata.items()
        for chunk in tensor.chunks
    }
    for index, place in metadata.storage_data.items():
        offsets = tuple(index.offset)
        piece = {
            "offsets": offsets,
            "sizes": sizes[index.fqn, offsets],
            "file": place.relative_path,
            "start": place.offset,
            "length": place.length,
        }
        found[index.fqn].append(piece)
    return found


def _check_pieces(folder: Path, pieces: dict[str, list[dict[str, Any]]]) -> None:
    """Every rank's file is where rank 0 sees it."""
    for name in sorted({piece["file"] for of_one in pieces.values() for piece in of_one}):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"no {name} of another rank: is it a disk that all ranks see?")


# Reading.


def _room_for(tensor: Tensor, owner: Tensor | None, dims: list[int | None]) -> Tensor:
    """A tensor to be read into: spread as `owner` is, or whole.

    One of another shape than its owner's is spread as it was, if the mesh has as many dimensions.
    """
    if owner is None or not is_dtensor(owner):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    if tensor.shape == owner.shape:
        local = torch.empty_like(local_part(owner), dtype=tensor.dtype, requires_grad=False)
        return like_parameter(owner, local)
    from torch.distributed.tensor import Replicate, Shard, empty

    mesh: Any = owner.device_mesh  # type: ignore[attr-defined]
    kept = dims if len(dims) == mesh.ndim else [None] * mesh.ndim
    placements = [Replicate() if dim is None else Shard(dim) for dim in kept]
    return empty(tensor.shape, dtype=tensor.dtype, device_mesh=mesh, placements=placements)


def _read_tensors(path: Path, skeleton: dict[str, Any], targets: dict[str, Tensor]) -> None:
    """Reads of every tensor the pieces that lie here, whatever pieces were written."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    pieces = skeleton["pieces"]
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(targets), _metadata(pieces, targets), is_coordinator=False)
    places = {
        (name, tuple(piece["offsets"])): piece
        for name, of_one in pieces.items()
        for piece in of_one
    }
    of_file: dict[str, list[Any]] = {}
    for item in planner.create_local_plan().items:
        of_file.setdefault(places[_place(item)]["file"], []).append(item)
    for name, items in of_file.items():
        with (path / os.path.basename(name)).open("rb") as file:
            for item in items:
                piece = places[_place(item)]
                part = _read_piece(file, piece, has_checksum=skeleton["has_checksums"])
                bounds = zip(item.storage_offsets, item.lengths, strict=True)
                for dim, (start, length) in enumerate(bounds):
                    part = part.narrow(dim, start, length)
                planner.resolve_tensor(item).detach().copy_(part)


def _place(item: Any) -> tuple[str, tuple[int, ...]]:
    return item.storage_index.fqn, tuple(item.storage_index.offset or ())


def _metadata(pieces: dict[str, list[dict[str, Any]]], targets: dict[str, Tensor]) -> Any:
    """What DCP's planner wants to know of the files."""
    from torch.distributed.checkpoint import metadata as dcp

    return dcp.Metadata(
        {
            name: dcp.TensorStorageMetadata(
                dcp.TensorProperties(dtype=target.dtype),
                target.shape,
                [_chunk(dcp, piece) for piece in pieces[name]],
            )
            for name, target in targets.items()
        }
    )


def _chunk(dcp: Any, piece: dict[str, Any]) -> Any:
    return dcp.ChunkStorageMetadata(torch.Size(piece["offsets"]), torch.Size(piece["sizes"]))


def _read_piece(file: io.BufferedReader, piece: dict[str, Any], *, has_checksum: bool) -> Tensor:
    file.seek(piece["start"])
    data = io.BytesIO(file.read(piece["length"]))
    with zipfile.ZipFile(data) as archive:
        damaged = archive.testzip() if has_checksum else None
    if damaged is not None:
        raise ValueError(f"{file.name} has other bytes than were written")
    data.seek(0)
    tensor: Tensor = torch.load(data, map_location="cpu", weights_only=True)
    return tensor
