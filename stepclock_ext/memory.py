"""The memory ledger: what each part of training takes, set against what was measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from .state_sizes import count_moments, master_size, sum_dtype, wide_dtype

__all__ = ["ActivationFit", "MemoryLedger", "estimate_activation_bytes"]


@dataclass(frozen=True, kw_only=True)
class MemoryLedger:
    """Bytes of a training run on one device. Counted, not allocated: meta tensors are welcome.

    A 16-bit parameter that the wrapper sums in fp32 and updates by its fused rule::

        parameter 2, sum 4, no gradient (dropped as it arrives), each moment 4
        with masters: bf16 +2 (the lower half of the fp32 value), fp16 +4 (an fp32 copy)
        with sharded states on N ranks: moments and masters / N

    Attributes:
        parameter_bytes: the parameters, each once, trained or not.
        buffer_bytes: what else a module keeps on the device.
        gradient_bytes: one gradient of each trained parameter, which is its window sum as well
            unless an accumulator is apart; none beside an fp32 sum that the fused rule reads.
        accumulator_bytes: window sums in a dtype that is not the gradient's, or in the buckets of
            the wrapper's own reduction.
        master_bytes: what 16-bit parameters need to be exact fp32 values.
        moment_bytes: the optimizer's state.
        ema_bytes: averaged weights, fp32 for 16-bit parameters.
        activation_bytes: as given.

    Example:
        >>> ledger = MemoryLedger.of(7_000_000_000, optimizer="adamw")
        >>> ledger.total_bytes
        112000000000
        >>> half = {"dtype": torch.bfloat16, "gradient_accumulation_steps": 8}
        >>> MemoryLedger.of(1_000_000, **half).total_bytes
        14000000
        >>> zero_1 = {"process_group": True, "shard_states": True, "world_size": 8}
        >>> MemoryLedger.of(1_000_000, **half, **zero_1).total_bytes
        7500000
        >>> print(MemoryLedger.of(1_000_000, optimizer="sgd").table(measured_bytes=10_000_000))
        parameters          4,000,000
        gradients           4,000,000
        total               8,000,000
        measured peak      10,000,000
        unexplained         2,000,000   20.0 % of the peak
    """

    parameter_bytes: int = 0
    buffer_bytes: int = 0
    gradient_bytes: int = 0
    accumulator_bytes: int = 0
    master_bytes: int = 0
    moment_bytes: int = 0
    ema_bytes: int = 0
    activation_bytes: int = 0

    @staticmethod
    def of(
        source: torch.nn.Module | Iterable[Tensor] | int,
        *,
        optimizer: torch.optim.Optimizer | str = "adamw",
        momentum: bool = False,
        amsgrad: bool = False,
        dtype: torch.dtype | None = None,
        gradient_accumulation_steps: int = 1,
        accumulate_dtype: torch.dtype | None = None,
        master_weights: bool = False,
        fused: bool = True,
        ema: bool = False,
        process_group: bool = False,
        shard_states: bool = False,
        world_size: int = 1,
        activation_bytes: int = 0,
    ) -> MemoryLedger:
        """The ledger of a model.

        Args:
            source: a module, its parameters, or how many there are. A parameter that comes twice
                (tied weights) counts once; one that needs no gradient counts as a parameter alone.
            optimizer: "sgd", "adam" or "adamw"; or a torch optimizer of one of these, which also
                says `momentum` and `amsgrad`.
            momentum: SGD keeps one moment.
            amsgrad: Adam keeps a third moment.
            dtype: of the parameters; None takes each one's own, and fp32 for a number of them.
            gradient_accumulation_steps: with more than one, 16-bit gradients are summed in fp32.
            accumulate_dtype: of the sums of 16-bit gradients; None is as described.
            master_weights: exact fp32 values are kept beside 16-bit parameters.
            fused: the wrapper's fused update rule, with fp32 moments wherever sums or masters are
                fp32. False: the optimizer's own step, which needs a gradient in the parameter's
                dtype beside any other sum, and keeps moments in that dtype; with masters, which are
                whole fp32 copies, moments are fp32.
            ema: averaged weights are kept.
            process_group: the wrapper reduces gradients by itself. It sums them in flat buckets,
                fp32 for 16-bit parameters, also in windows of one micro step; the buckets take the
                place of gradients.
            shard_states: moments, masters and averages are shared among the ranks: ceil(numel /
                world_size) elements of each parameter. A share of the sums comes on top, and
                padding, which is not counted: below 64 elements a parameter, 64 * world_size a
                bucket.
            world_size: how many ranks there are; it counts with `shard_states` alone.
            activation_bytes: of the largest micro batch; see `estimate_activation_bytes` and
                `ActivationFit`.

        Raises:
            TypeError, ValueError: an argument is outside its range.
        """
        parts = {name: 0 for name in (field.name for field in fields(MemoryLedger))}
        parts["activation_bytes"] = _check_count("activation_bytes", activation_bytes, least=0)
        steps = _check_count("gradient_accumulation_steps", gradient_accumulation_steps, least=1)
        num_ranks = _check_count("world_size", world_size, least=1)
        if shard_states and not process_group:
            raise ValueError(
                "MemoryLedger.of: shard_states must go with the wrapper's own reduction, got "
                "process_group=False; pass process_group=True"
            )
        num_moments = count_moments(optimizer, momentum=momentum, amsgrad=amsgrad)
        if isinstance(source, torch.nn.Module):
            parts["buffer_bytes"] = sum(b.nbytes for b in _once(source.buffers()))
        for numel, own, is_trained in _list_parameters(source):
            kept = own if dtype is None else dtype
            parts["parameter_bytes"] += numel * kept.itemsize
            if not is_trained:
                continue
            num_kept = -(-numel // num_ranks) if shard_states else numel
            wide, is_summed = wide_dtype(kept), process_group or steps > 1
            sums = sum_dtype(kept, accumulate_dtype, is_summed=is_summed, fused=fused)
            is_wider, has_master = sums != kept, master_weights and wide != kept
            is_apart = is_wider or process_group
            has_gradient = not is_apart or (is_wider and not fused)
            moment = wide if has_master or (fused and is_wider) else kept
            parts["gradient_bytes"] += numel * kept.itemsize if has_gradient else 0
            has_share = shard_states and num_ranks > 1
            num_summed = numel + num_kept * has_share  # buckets, and this rank's share of them
            parts["accumulator_bytes"] += num_summed * sums.itemsize if is_apart else 0
            parts["master_bytes"] += num_kept * master_size(kept, fused=fused) * has_master
            parts["moment_bytes"] += num_moments * num_kept * moment.itemsize
            parts["ema_bytes"] += num_kept * wide.itemsize if ema else 0
        return MemoryLedger(**parts)

    @property
    def total_bytes(self) -> int:
        """All parts together."""
        return sum(vars(self).values())

    def unexplained_bytes(self, measured_bytes: int) -> int:
        """What of a measured peak no part explains; below 0 where the ledger claims too much."""
        return measured_bytes - self.total_bytes

    def rows(self) -> list[tuple[str, int]]:
        """Name and bytes of each part that is not empty."""
        names = {name: f"{name.removesuffix('_bytes')}s" for name in vars(self)}
        names |= {"ema_bytes": "averaged weights", "master_bytes": "master weights"}
        return [(names[name], size) for name, size in vars(self).items() if size]

    def table(self, *, measured_bytes: int | None = None) -> str:
        """The parts as text, and the rest of a measured peak that they do not explain."""
        rows = [*self.rows(), ("total", self.total_bytes)]
        share = ""
        if measured_bytes is not None:
            rest = self.unexplained_bytes(measured_bytes)
            rows += [("measured peak", measured_bytes), ("unexplained", rest)]
            share = f"   {rest / measured_bytes:.1%} of the peak".replace("%", " %")
        return "\n".join(f"{name:<16}{size:>13,}" for name, size in rows) + share


def estimate_activation_bytes(
    *, batch_size: int, num_layers: int, sequence_length: int, hidden_size: int, k: float = 14.0
) -> int:
    """A transformer's activations in one micro batch: ``B * L * S * H * k`` bytes.

    Args:
        batch_size: B, samples in a micro batch.
        num_layers: L.
        sequence_length: S, tokens of a sample.
        hidden_size: H.
        k: bytes kept for each element of the hidden state in a layer, 8 to 20. Where two peaks can
            be measured, `ActivationFit` is better.

    Raises:
        ValueError: `k` is outside 8 to 20, or a count is not positive.

    Example:
        >>> sizes = {"batch_size": 4, "num_layers": 32, "sequence_length": 2048}
        >>> [estimate_activation_bytes(**sizes, hidden_size=4096, k=k) >> 30 for k in (8, 20)]
        [8, 20]
    """
    if not 8 <= k <= 20:
        raise ValueError(
            f"estimate_activation_bytes: k must be from 8 to 20, got {k}; measure two batch sizes "
            "and use ActivationFit where a model is outside"
        )
    counts = (
        ("batch_size", batch_size),
        ("num_layers", num_layers),
        ("sequence_length", sequence_length),
        ("hidden_size", hidden_size),
    )
    elements = 1
    for name, value in counts:
        elements *= _check_count(name, value, least=1, where="estimate_activation_bytes")
    return round(elements * k)


@dataclass(frozen=True)
class ActivationFit:
    """A line through the peaks of two batch sizes: a fixed part, and a part for each sample.

    Example:
        >>> fit = ActivationFit.through((2, 1_200_000), (8, 1_800_000))
        >>> fit.fixed_bytes, fit.bytes_per_sample, fit.activation_bytes(16)
        (1000000, 100000, 1600000)
    """

    fixed_bytes: int
    bytes_per_sample: int

    @staticmethod
    def through(first: tuple[int, int], second: tuple[int, int]) -> ActivationFit:
        """The line through two measurements, each a batch size and its peak in bytes.

        Raises:
            ValueError: the batch sizes are the same, or the peak falls as they grow.
        """
        (small, low), (large, high) = sorted((first, second))
        if small == large or high < low:
            raise ValueError(
                "ActivationFit.through: two batch sizes must differ, and the larger have the "
                f"larger peak, got {first} and {second}; measure further apart"
            )
        each = round((high - low) / (large - small))
        return ActivationFit(low - small * each, each)

    def activation_bytes(self, batch_size: int) -> int:
        """What a batch adds to the fixed part."""
        return batch_size * self.bytes_per_sample


def _list_parameters(
    source: torch.nn.Module | Iterable[Tensor] | int,
) -> list[tuple[int, torch.dtype, bool]]:
    """Elements, dtype and whether it is trained, of each parameter once."""
    if isinstance(source, (bool, int, float)):
        return [(_check_count("the number of parameters", source, least=1), torch.float32, True)]
    params = _once(source.parameters() if isinstance(source, torch.nn.Module) else source)
    if not params:
        raise ValueError("MemoryLedger.of: source must have parameters, got none; pass the model")
    return [(p.numel(), p.dtype, p.requires_grad) for p in params]


def _once(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _check_count(name: str, value: Any, *, least: int, where: str = "MemoryLedger.of") -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{where}: {name} must be an integer, got {value!r}; pass a whole number")
    if value < least:
        raise ValueError(f"{where}: {name} must be {least} or more, got {value}")
    return value
