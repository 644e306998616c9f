"""DTensors, and the part of each that lies in this process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

__all__ = ["is_dtensor", "like_parameter", "local_gradient", "local_part", "owns_copy"]


def is_dtensor(tensor: Any) -> bool:
    """Whether it is spread over a mesh. Loads nothing where DTensor was never imported."""
    return hasattr(tensor, "_local_tensor") and hasattr(tensor, "device_mesh")


def local_part(tensor: Tensor) -> Tensor:
    """What of `tensor` lies here: the very object that a DTensor holds, or `tensor` itself."""
    if not is_dtensor(tensor):
        return tensor
    local: Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return local.wait() if hasattr(local, "wait") else local


def local_gradient(p: Tensor) -> Tensor | None:
    """What of a parameter's gradient lies here; ``p.grad`` is spread as `p` is from now on."""
    if p.grad is None or not is_dtensor(p):
        return p.grad
    spread: Any = p.grad
    wanted: Any = p
    if is_dtensor(spread) and tuple(spread.placements) != tuple(wanted.placements):
        p.grad = spread.redistribute(wanted.device_mesh, wanted.placements)  # Partial, say
    assert p.grad is not None
    return local_part(p.grad)


def like_parameter(p: Tensor, value: Tensor) -> Tensor:
    """`value` as a tensor that is spread as `p` is.

    Args:
        p: a parameter.
        value: of the shape of `p`, whole on every rank, or of the shape of its local part, or a
            DTensor.

    Raises:
        ValueError: `value` has another shape.
    """
    if not is_dtensor(p):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    spread: Any = p
    mesh, placements = spread.device_mesh, spread.placements
    if isinstance(value, DTensor):
        if value.dtype == torch.int16 and tuple(value.placements) != tuple(placements):
            sent: Any = value.to(torch.int32)  # collectives do not take remainders as they are
            moved: Tensor = sent.redistribute(mesh, placements).to(torch.int16)
            return moved
        return value.redistribute(mesh, placements)
    with torch.no_grad():
        if value.shape == local_part(p).shape:
            return DTensor.from_local(
                value, mesh, placements, run_check=False, shape=p.shape, stride=p.stride()
            )
        if value.shape != p.shape:
            raise ValueError(
                f"a tensor beside a parameter of {tuple(p.shape)} must have its shape, got "
                f"{tuple(value.shape)}"
            )
        whole = value.to(local_part(p).device)
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def owns_copy(p: Tensor) -> bool:
    """Whether, of all processes that hold equal copies of this part, this one stands for them."""
    if not is_dtensor(p):
        return dist.get_rank() == 0
    spread: Any = p
    place = spread.device_mesh.get_coordinate()
    if place is None:
        return False
    pairs = zip(place, spread.placements, strict=True)
    return all(index == 0 for index, placement in pairs if placement.is_replicate())
