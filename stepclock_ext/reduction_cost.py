"""What the reduction of one update costs on paper: bytes, collectives, seconds on the wire."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["ReductionCost"]

# What an engine sends in one round: how often each element goes around the ring, what it is, and
# where in a micro step it goes. "after" is past the last backward, where nothing computes.
_ENGINES = {
    "all_reduce": ((2, "sum", "backward"),),
    "reduce_scatter": ((1, "sum", "backward"), (1, "parameter", "after")),
    "ddp": ((2, "sum", "backward"),),
    "ddp_every_micro_step": ((2, "sum", "backward"),),
    "fsdp": ((1, "parameter", "forward"), (1, "parameter", "backward"), (1, "sum", "backward")),
}
_EVERY_MICRO_STEP = ("ddp_every_micro_step", "fsdp")
_CONTROL_MESSAGES = {"all_reduce": 1, "reduce_scatter": 2}
_CONTROL_BYTES = 17 * 8  # a rank's message: float64 numbers

# Backward computes twice what forward does: 4 and 2 FLOPs a parameter and token (Kaplan et al.
# 2020, "Scaling Laws for Neural Language Models", section 2.1).
_COMPUTE_SHARE = {"forward": 1 / 3, "backward": 2 / 3, "after": 0.0}


@dataclass(frozen=True, kw_only=True)
class ReductionCost:
    """What data parallelism sends for one update, by ring algorithms. Nothing is measured.

    N ranks send S bytes around a ring in equal chunks of S / N, the last one padded::

        all-reduce       2 (N - 1) chunks a rank    2 (N - 1) hops
        reduce-scatter     (N - 1)                    (N - 1)
        all-gather         (N - 1)                    (N - 1)

    which no algorithm of point-to-point messages undercuts (Patarasuk & Yuan 2009, "Bandwidth
    optimal all-reduce algorithms for clusters of workstations"). Sharded states cost no more than
    an all-reduce if sums and parameters have one dtype (Rajbhandari et al. 2020, "ZeRO", section
    7). Trees have 2 log2(N) hops (Sanders et al. 2009, "Two-tree algorithms for full bandwidth
    broadcast, reduction and scan"): at a thousand ranks, latency here is an upper bound.

    Attributes:
        num_parameters: trained elements that a rank holds, or would hold if nothing were sharded.
        world_size: N. One rank has nobody to send to, and everything is 0.
        engine: "all_reduce": the wrapper's window sums, once an update. "reduce_scatter": the same
            with sharded states; each rank gets its share of the sums and gives away its updated
            parameters. "ddp": DDP inside `no_sync` but for the last micro step;
            "ddp_every_micro_step": DDP without it. "fsdp": FSDP2, at every micro step parameters
            are gathered and gradients scattered.
        param_dtype: of the parameters, as they are gathered.
        reduce_dtype: of what is summed. None: fp32 for 16-bit parameters in the wrapper's own
            reduction, else `param_dtype`, the default of DDP and FSDP2.
        gradient_accumulation_steps: micro steps of an update.
        reshard_after_forward: "fsdp" alone. Parameters are dropped after forward and gathered once
            more in backward; None means True.
        bucket_cap_mb: MiB of sums that one collective takes; DDP's default is 25. In "fsdp" it
            stands for what is wrapped together, usually a layer.
        gpus_per_node: with more than one, and N beyond a node, there is one ring for each GPU of
            a node, which takes that share of the bytes and leaves the node by that GPU's own
            network card. The card is the slowest link where a GPU's NVLink is at least
            `gpus_per_node` - 1 times as fast. (So measured: NVIDIA/nccl, issue 1576, has 192 GB/s
            of bus bandwidth from 8 cards of 25 GB/s.) With 1, each hop is as slow as a card.

    Raises:
        TypeError, ValueError: an argument is outside its range.

    Example:
        >>> bf16 = {"num_parameters": 1_000_000, "world_size": 8, "param_dtype": torch.bfloat16}
        >>> for engine in ("all_reduce", "reduce_scatter", "fsdp"):
        ...     cost = ReductionCost(engine=engine, gradient_accumulation_steps=8, **bf16)
        ...     cost.payload_bytes, cost.wire_bytes, cost.num_collectives
        (4000000, 7000000, 1)
        (6000000, 5250000, 2)
        (48000000, 42000000, 24)
    """

    num_parameters: int
    world_size: int
    engine: str
    param_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype | None = None
    gradient_accumulation_steps: int = 1
    reshard_after_forward: bool | None = None
    bucket_cap_mb: float = 25.0
    gpus_per_node: int = 1

    def __post_init__(self) -> None:
        _check_counts(self)
        if self.engine not in _ENGINES:
            raise ValueError(
                f"ReductionCost: engine must be one of {', '.join(_ENGINES)}, got {self.engine!r}; "
                "pass the one that sends as much"
            )
        _check_dtype("param_dtype", self.param_dtype)
        if self.reduce_dtype is not None:
            _check_dtype("reduce_dtype", self.reduce_dtype)
        if self.reshard_after_forward is not None and self.engine != "fsdp":
            raise ValueError(
                "ReductionCost: reshard_after_forward must go with fsdp, got engine "
                f"{self.engine!r}; leave it out"
            )
        _check_number("bucket_cap_mb", self.bucket_cap_mb)

    @property
    def payload_bytes(self) -> int:
        """Bytes that a rank hands to collectives, or gets from an all-gather; control apart."""
        if self.world_size == 1:
            return 0
        each = sum(size for _, size, _ in self._transfers())
        return self._num_rounds * self.num_parameters * each

    @property
    def wire_bytes(self) -> int:
        """Bytes that the busiest rank sends for one update; control messages apart."""
        each = sum(times * size for times, size, _ in self._transfers())
        return self._num_rounds * (self.world_size - 1) * self._chunk_size * each

    @property
    def link_bytes(self) -> int:
        """What of `wire_bytes` goes over the slowest link: ``ceil(wire_bytes / gpus_per_node)``.

        All of them inside one node, where the slowest link is NVLink.

        Example:
            >>> sizes = {"num_parameters": 1600, "engine": "ddp", "gpus_per_node": 8}
            >>> [ReductionCost(world_size=n, **sizes).link_bytes for n in (8, 16)]
            [11200, 1500]
        """
        return -(-self.wire_bytes // self._num_rings)

    @property
    def control_bytes(self) -> int:
        """What a rank sends for the wrapper's own messages: (N - 1) times 136 bytes, each.

        At the end of a window 17 float64 numbers of each rank are gathered, with sharded states
        twice.
        """
        return self._num_messages * (self.world_size - 1) * _CONTROL_BYTES

    @property
    def num_collectives(self) -> int:
        """How many are started for one update, control messages apart.

        Each bucket takes one of each kind; a run has some more, as a bucket ends where a parameter
        ends.
        """
        if self.world_size == 1:
            return 0
        return self._num_rounds * self._num_buckets * len(self._transfers())

    def wire_seconds(self, *, bandwidth: float, latency: float = 0.0) -> float:
        """Seconds on the wire for one update, collectives one after the other.

        Args:
            bandwidth: bytes a second that a GPU sends over the slowest link; 50e9 for 400 Gb/s.
            latency: seconds of one hop. A ring waits for 2 (N - 1) of them in each all-reduce and
                for N - 1 in every other collective.

        Example:
            >>> ring = ReductionCost(num_parameters=1_000_000, world_size=4, engine="ddp")
            >>> ring.wire_seconds(bandwidth=6e6), ring.wire_seconds(bandwidth=6e6, latency=0.5)
            (1.0, 4.0)
        """
        return sum(self._phases(bandwidth, latency).values())

    def overlap_needed(
        self,
        *,
        micro_step_seconds: float,
        bandwidth: float,
        latency: float = 0.0,
        max_share: float = 0.05,
    ) -> float:
        """Share of the wire time to hide, so that the rest is at most `max_share` of the compute.

        ``max(0, 1 - max_share * K * micro_step_seconds / wire_seconds)``, K micro steps an update.

        Args:
            micro_step_seconds: forward and backward of one micro step, without communication.
            bandwidth, latency: as in `wire_seconds`.
            max_share: what the reduction may add to an update's compute time.

        Example:
            >>> ring = ReductionCost(num_parameters=1_000_000, world_size=4, engine="ddp")
            >>> ring.overlap_needed(micro_step_seconds=5.0, bandwidth=6e6)
            0.75
            >>> ring.overlap_possible(micro_step_seconds=0.75, bandwidth=6e6)
            0.5
        """
        _check_number("micro_step_seconds", micro_step_seconds)
        _check_number("max_share", max_share, least=0.0)
        wire = self.wire_seconds(bandwidth=bandwidth, latency=latency)
        allowed = max_share * self.gradient_accumulation_steps * micro_step_seconds
        return max(0.0, 1 - allowed / wire) if wire else 0.0

    def overlap_possible(
        self, *, micro_step_seconds: float, bandwidth: float, latency: float = 0.0
    ) -> float:
        """Share of the wire time that there is compute to hide it behind; 1 without wire time.

        A reduction hides behind the backward of its micro step, two thirds of the compute, and a
        gather of "fsdp" behind the pass that it is for. What "reduce_scatter" gathers after the
        update, and control messages, hide behind nothing. An upper bound: the last bucket, one of
        all, is complete only when backward ends. Arguments as in `overlap_needed`.
        """
        _check_number("micro_step_seconds", micro_step_seconds)
        phases = self._phases(bandwidth, latency)
        compute = self._num_rounds * micro_step_seconds
        hidden = sum(min(phases[name], part * compute) for name, part in _COMPUTE_SHARE.items())
        wire = sum(phases.values())
        return hidden / wire if wire else 1.0

    @property
    def _chunk_size(self) -> int:
        return -(-self.num_parameters // self.world_size)

    @property
    def _num_rounds(self) -> int:
        """Micro steps of an update that communicate."""
        return self.gradient_accumulation_steps if self.engine in _EVERY_MICRO_STEP else 1

    @property
    def _num_rings(self) -> int:
        return self.gpus_per_node if self.world_size > self.gpus_per_node else 1

    @property
    def _num_messages(self) -> int:
        return _CONTROL_MESSAGES.get(self.engine, 0)

    @property
    def _num_buckets(self) -> int:
        return math.ceil(self.num_parameters * self._sum_size / (self.bucket_cap_mb * 2**20))

    @property
    def _sum_size(self) -> int:
        if self.reduce_dtype is not None:
            return self.reduce_dtype.itemsize
        own = self.param_dtype.itemsize
        return max(own, torch.float32.itemsize) if self._num_messages else own

    def _transfers(self) -> list[tuple[int, int, str]]:
        """Of one round: times around the ring, bytes an element, phase."""
        transfers = list(_ENGINES[self.engine])
        if self.reshard_after_forward is False:
            transfers.remove((1, "parameter", "backward"))
        sizes = {"sum": self._sum_size, "parameter": self.param_dtype.itemsize}
        return [(times, sizes[what], phase) for times, what, phase in transfers]

    def _phases(self, bandwidth: float, latency: float) -> dict[str, float]:
        """Seconds on the wire of one update, by where they fall."""
        _check_number("bandwidth", bandwidth)
        _check_number("latency", latency, least=0.0)
        others, rounds = self.world_size - 1, self._num_rounds
        seconds = dict.fromkeys(_COMPUTE_SHARE, 0.0)
        for times, size, phase in self._transfers():
            sent = rounds * times * others * self._chunk_size * size / self._num_rings
            hops = rounds * times * others * self._num_buckets
            seconds[phase] += sent / bandwidth + hops * latency
        seconds["after"] += self.control_bytes / bandwidth + self._num_messages * others * latency
        return seconds


def _check_counts(cost: ReductionCost) -> None:
    for name in ("num_parameters", "world_size", "gradient_accumulation_steps", "gpus_per_node"):
        value = getattr(cost, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(
                f"ReductionCost: {name} must be an integer, got {value!r}; pass a whole number"
            )
        if value < 1:
            raise ValueError(f"ReductionCost: {name} must be 1 or more, got {value}")
    num_ranks, each = cost.world_size, cost.gpus_per_node
    if num_ranks > each and num_ranks % each:
        raise ValueError(
            f"ReductionCost: world_size must be a multiple of gpus_per_node={each}, got "
            f"{num_ranks}; pass gpus_per_node=1 for nodes of different sizes"
        )


def _check_dtype(name: str, value: Any) -> None:
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise TypeError(
            f"ReductionCost: {name} must be a floating-point torch.dtype, got {value!r}; pass "
            "torch.bfloat16 or another"
        )


def _check_number(name: str, value: Any, *, least: float | None = None) -> None:
    """Finite, and above 0 where `least` is None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"ReductionCost: {name} must be a number, got {value!r}")
    fits = value > 0 if least is None else value >= least
    if not (fits and math.isfinite(value)):
        wanted = "positive" if least is None else f"{least:g} or more"
        raise ValueError(f"ReductionCost: {name} must be {wanted} and finite, got {value}")
