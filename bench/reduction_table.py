"""Prints the section "Reduction on paper" of README.md, from `stepclock_ext.reduction_cost`."""

from __future__ import annotations

from typing import Any

import torch

from stepclock_ext.reduction_cost import ReductionCost

SIZES = [7 * 10**9, 70 * 10**9]  # parameters
RANKS = [8, 64, 1024, 8192]
STEPS, TOKENS, FLOPS = 8, 8192, 400e12  # micro steps an update; of a micro step; a second
NODE, CARD, NVLINK = 8, 50e9, 450e9  # GPUs; bytes a second and GPU, one way
HOP = 2e-6  # seconds
ENGINES = {
    "DDP without `no_sync`, bf16": ("ddp_every_micro_step", torch.bfloat16),
    "DDP once an update, bf16": ("ddp", torch.bfloat16),
    "**ours, fp32**": ("all_reduce", torch.float32),
    "**ours, fp32, sharded states**": ("reduce_scatter", torch.float32),
    "FSDP2, fp32 reduction": ("fsdp", torch.float32),
}
TEXT = f"""## Reduction on paper

`.venv/bin/python bench/reduction_table.py` prints this section. Nothing in it is measured: it is
`stepclock_ext.reduction_cost` for bf16 models of n = 7 and 70 billion parameters, K = {STEPS} micro
steps an update. N GPUs send S bytes by rings (Patarasuk & Yuan 2009; Rajbhandari et al. 2020):

```text
                bytes sent a GPU     hops         S
all-reduce      2 (N - 1) / N * S    2 (N - 1)    DDP 2 n, ours 4 n
reduce-scatter    (N - 1) / N * S      (N - 1)    sharded states and FSDP2 4 n
all-gather        (N - 1) / N * S      (N - 1)    sharded states 2 n, FSDP2 2 n before each pass
  DDP without no_sync and FSDP2: at each of the K micro steps; the others: once an update
compute c       6 n * {TOKENS:,} tokens / {FLOPS / 1e12:.0f} TFLOP/s a micro step, 1/3 in forward
needed          max(0, 1 - 5 % * K c / wire): to hide, so that the rest adds 5 % to the compute
possible        what of the wire time fits behind the passes that run beside it
```

Compute and bytes both grow with n, so both models have the same shares. Paper does not ask what
fits; `stepclock_ext.memory` does: sums alone take 28 and 280 GB, the parameters 14 and 140.

"One card a GPU": each hop at {CARD / 1e9:.0f} GB/s (400 Gb/s), as with one GPU a node. "8 a node":
8 rings, each with an eighth of the bytes, leave a node by 8 such cards, the slowest link; 8 GPUs
stay inside, on NVLink at {NVLINK / 1e9:.0f} GB/s each. Bold shares: more is needed than possible.

| GPUs | engine | GB sent a GPU, 7 B; 70 B | one card a GPU: wire s | needed | possible \
| 8 a node: wire s | needed | possible |
|---|---|---|---|---|---|---|---|---|"""
HOPS = f"""
The same with hops of {HOP * 1e6:.0f} us, for ours in fp32, 7 B, 8 a node: a flat ring waits for all
hops in every bucket, however small. Where N is large, buckets must grow, or the library take trees
(2 log2 N hops; Sanders et al. 2009). Control messages, 136 bytes of each GPU, are included.

| GPUs | ms of hops a bucket | wire s without hops | 25 MiB: buckets | wire s \
| 1 GiB: buckets | wire s |
|---|---|---|---|---|---|---|"""


def on_paper(name: str, numel: int, ranks: int, **changes: Any) -> ReductionCost:
    engine, dtype = ENGINES[name]
    changes |= {"param_dtype": torch.bfloat16, "gradient_accumulation_steps": STEPS}
    changes |= {"num_parameters": numel, "world_size": ranks}
    return ReductionCost(engine=engine, reduce_dtype=dtype, **changes)


def overlap_cells(costs: list[ReductionCost], bandwidth: float) -> list[str]:
    """Wire time of each model, and their shares, which are the same."""
    shares = set()
    for cost in costs:
        seconds = 6 * cost.num_parameters * TOKENS / FLOPS
        needed = cost.overlap_needed(bandwidth=bandwidth, micro_step_seconds=seconds)
        possible = cost.overlap_possible(bandwidth=bandwidth, micro_step_seconds=seconds)
        mark = "**" if needed > possible else ""
        shares.add((f"{mark}{100 * needed:.0f} %{mark}", f"{100 * possible:.0f} %"))
    (both,) = shares
    return ["; ".join(f"{c.wire_seconds(bandwidth=bandwidth):#.3g}" for c in costs), *both]


def engine_cells(ranks: int, name: str) -> list[str]:
    flat, nodes = ([on_paper(name, n, ranks, gpus_per_node=g) for n in SIZES] for g in (1, NODE))
    sent = "; ".join(f"{cost.wire_bytes / 1e9:,.0f}" for cost in flat)
    beyond = overlap_cells(nodes, CARD if ranks > NODE else NVLINK)
    return [f"{ranks:,}", name, sent, *overlap_cells(flat, CARD), *beyond]


def hop_cells(ranks: int, name: str = "**ours, fp32**") -> list[str]:
    cells, line = [f"{2e3 * (ranks - 1) * HOP:#.3g}"], CARD if ranks > NODE else NVLINK
    for size in (25.0, 1024.0):
        cost = on_paper(name, SIZES[0], ranks, gpus_per_node=NODE, bucket_cap_mb=size)
        seconds = [cost.wire_seconds(bandwidth=line, latency=latency) for latency in (0.0, HOP)]
        cells += [f"{cost.num_collectives:,}", f"{seconds[1]:#.3g}"]
    return [f"{ranks:,}", cells[0], f"{seconds[0]:#.3g}", *cells[1:]]


if __name__ == "__main__":
    by_engine = [engine_cells(ranks, name) for ranks in RANKS for name in ENGINES]
    for head, rows in ((TEXT, by_engine), (HOPS, [hop_cells(ranks) for ranks in RANKS])):
        print(head, *(f"| {' | '.join(cells)} |" for cells in rows), sep="\n")
