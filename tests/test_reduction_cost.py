"""The reduction on paper, against rings that are walked chunk by chunk, and against hand counts."""

import dataclasses
from itertools import pairwise

import pytest
import torch

from stepclock_ext.reduction_cost import ReductionCost

BF16 = torch.bfloat16
ENGINES = ["all_reduce", "reduce_scatter", "ddp", "ddp_every_micro_step", "fsdp"]
RANKS = [2, 3, 4, 8]
NUMELS = [1, 7, 8, 9, 24, 1_000, 1_001]  # divided by all of `RANKS`, some, none
LINE = {"bandwidth": 1e9}
each_engine = pytest.mark.parametrize("engine", ENGINES)
each_rank_count = pytest.mark.parametrize("num_ranks", RANKS)


def cost(**changes):
    return ReductionCost(**{"num_parameters": 840, "world_size": 4, "engine": "ddp", **changes})


class Ring:
    """Ranks that pass chunks of fp32 numbers to the next, and count bytes and hops."""

    def __init__(self, numel, num_ranks, *, order=None):
        self.order = list(range(num_ranks)) if order is None else order
        self.sent = dict.fromkeys(self.order, 0)
        self.left_node = dict.fromkeys(self.order, 0)
        self.hops = 0
        # rank r holds r + 1 everywhere; a chunk is a list, the last ones may be shorter
        ends = [numel * n // num_ranks for n in range(num_ranks + 1)]
        self.held = {r: [[float(r + 1)] * (b - a) for a, b in pairwise(ends)] for r in self.order}

    def _pass_on(self, first_chunk, take, *, gpus_per_node=10**9):
        """Each position sends one chunk to the next, N - 1 times."""
        num = len(self.order)
        for turn in range(num - 1):
            self.hops += 1
            moves = []
            for place, rank in enumerate(self.order):
                chunk = (place + first_chunk - turn) % num
                moves.append((rank, self.order[(place + 1) % num], chunk))
            values = [list(self.held[rank][chunk]) for rank, _, chunk in moves]
            for (rank, to, chunk), value in zip(moves, values, strict=True):
                self.sent[rank] += 4 * len(value)
                if rank // gpus_per_node != to // gpus_per_node:
                    self.left_node[rank] += 4 * len(value)
                self.held[to][chunk] = take(self.held[to][chunk], value)

    def reduce_scatter(self, **node):
        self._pass_on(0, lambda own, got: [a + b for a, b in zip(own, got, strict=True)], **node)

    def all_gather(self, **node):
        self._pass_on(1, lambda own, got: got, **node)

    def all_reduce(self, **node):
        self.reduce_scatter(**node)
        self.all_gather(**node)

    def is_reduced(self):
        total = float(sum(r + 1 for r in self.order))
        return all(x == total for rank in self.order for c in self.held[rank] for x in c)


@each_rank_count
@pytest.mark.parametrize("numel", NUMELS)
def test_a_rank_sends_what_a_ring_sends(num_ranks, numel):
    """To the byte where chunks are equal; else a padded element a hop is the most it is off by."""
    ring = Ring(numel, num_ranks)
    ring.all_reduce()
    assert ring.is_reduced()
    assert ring.hops == 2 * (num_ranks - 1)
    # of all ranks together, the textbook's 2 (N - 1) / N of the payload, N times
    assert sum(ring.sent.values()) == 2 * (num_ranks - 1) * 4 * numel
    for engine in ("ddp", "all_reduce", "reduce_scatter"):
        on_paper = cost(engine=engine, num_parameters=numel, world_size=num_ranks).wire_bytes
        if numel % num_ranks == 0:
            assert set(ring.sent.values()) == {on_paper}
        assert 0 <= on_paper - max(ring.sent.values()) <= 4 * ring.hops


@each_rank_count
def test_half_of_an_all_reduce_is_a_scatter_and_half_a_gather(num_ranks):
    ring = Ring(24 * num_ranks, num_ranks)
    ring.reduce_scatter()
    half = max(ring.sent.values())
    ring.all_gather()
    assert ring.is_reduced()
    assert half == 4 * 24 * (num_ranks - 1)
    sizes = {"num_parameters": 24 * num_ranks, "world_size": num_ranks, "param_dtype": BF16}
    # fp32 sums scattered, bf16 parameters gathered: a half as many bytes
    assert cost(engine="reduce_scatter", **sizes).wire_bytes == half + half // 2
    assert cost(engine="all_reduce", **sizes).wire_bytes == 2 * half
    # FSDP2 gathers twice and scatters in bf16; once less with the parameters kept
    fsdp = {"engine": "fsdp", **sizes}
    assert cost(**fsdp).wire_bytes == 3 * half // 2
    assert cost(**fsdp, reshard_after_forward=False).wire_bytes == 2 * half // 2
    assert cost(**fsdp, reduce_dtype=torch.float32).wire_bytes == 2 * half // 2 + half


@pytest.mark.parametrize("each", [2, 4])
@pytest.mark.parametrize("num_nodes", [2, 3])
def test_a_ring_for_each_gpu_of_a_node_shares_the_bytes_among_the_network_cards(each, num_nodes):
    """The ring of number i walks each node from GPU i + 1 to GPU i, so GPU i's card takes it out.

    Each ring has its share of the elements. No card sends more than the formula's.
    """
    num_ranks = each * num_nodes
    numel = 2 * num_ranks  # of a ring
    out = dict.fromkeys(range(num_ranks), 0)
    sent = dict.fromkeys(range(num_ranks), 0)
    for start in range(each):
        walk = [(start + 1 + i) % each for i in range(each)]
        order = [node * each + gpu for node in range(num_nodes) for gpu in walk]
        ring = Ring(numel, num_ranks, order=order)
        ring.all_reduce(gpus_per_node=each)
        assert ring.is_reduced()
        for rank in order:
            out[rank] += ring.left_node[rank]
            sent[rank] += ring.sent[rank]
    on_paper = cost(num_parameters=numel * each, world_size=num_ranks, gpus_per_node=each)
    assert set(sent.values()) == {on_paper.wire_bytes}
    assert set(out.values()) == {on_paper.link_bytes}
    assert on_paper.wire_seconds(**LINE) == pytest.approx(on_paper.link_bytes / 1e9)


@pytest.mark.parametrize(
    ("changes", "payload"),
    [
        ({"engine": "ddp"}, 4),
        ({"engine": "ddp", "param_dtype": BF16}, 2),
        ({"engine": "ddp_every_micro_step", "param_dtype": BF16}, 8 * 2),
        ({"engine": "all_reduce", "param_dtype": BF16}, 4),
        ({"engine": "all_reduce", "param_dtype": BF16, "reduce_dtype": BF16}, 2),
        ({"engine": "all_reduce", "param_dtype": torch.float64}, 8),
        ({"engine": "reduce_scatter"}, 4 + 4),
        ({"engine": "reduce_scatter", "param_dtype": torch.float16}, 4 + 2),
        ({"engine": "fsdp", "param_dtype": BF16}, 8 * (2 + 2 + 2)),
        ({"engine": "fsdp", "param_dtype": BF16, "reshard_after_forward": True}, 8 * (2 + 2 + 2)),
        ({"engine": "fsdp", "param_dtype": BF16, "reshard_after_forward": False}, 8 * (2 + 2)),
        ({"engine": "fsdp", "param_dtype": BF16, "reduce_dtype": torch.float32}, 8 * (2 + 2 + 4)),
    ],
)
def test_payload_bytes_a_parameter_of_an_update_of_8_micro_steps(changes, payload):
    for num_ranks in RANKS:
        paper = cost(gradient_accumulation_steps=8, world_size=num_ranks, **changes)
        assert paper.payload_bytes == 840 * payload


@each_engine
def test_one_rank_sends_nothing(engine):
    alone = cost(engine=engine, world_size=1, gradient_accumulation_steps=4)
    assert alone.payload_bytes == alone.wire_bytes == alone.link_bytes == 0
    assert alone.num_collectives == alone.control_bytes == 0
    assert alone.wire_seconds(bandwidth=1.0, latency=1.0) == 0
    assert alone.overlap_needed(micro_step_seconds=1.0, bandwidth=1.0) == 0
    assert alone.overlap_possible(micro_step_seconds=1.0, bandwidth=1.0) == 1


@each_engine
def test_more_of_anything_never_sends_less(engine):
    ranks = [cost(engine=engine, world_size=n).wire_bytes for n in (1, 2, 4, 8, 24, 120, 840)]
    assert ranks == sorted(ranks) and len(set(ranks)) == len(ranks)
    limit = cost(engine=engine).payload_bytes * (2 if "all" in engine or "ddp" in engine else 1)
    assert ranks[-1] < limit  # (N - 1) / N
    sizes = [cost(engine=engine, num_parameters=n).wire_bytes for n in (1, 4, 5, 8, 10**10)]
    assert sizes == sorted(sizes)
    steps = [cost(engine=engine, gradient_accumulation_steps=k).wire_bytes for k in (1, 2, 64)]
    every = engine in ("ddp_every_micro_step", "fsdp")
    assert steps == [steps[0] * k for k in ((1, 2, 64) if every else (1, 1, 1))]
    paper = cost(engine=engine, num_parameters=10**9, gradient_accumulation_steps=4)
    fast = [paper.wire_seconds(bandwidth=b, latency=1e-6) for b in (1e9, 1e10, 1e11)]
    assert fast == sorted(fast, reverse=True)
    needed = [paper.overlap_needed(micro_step_seconds=s, **LINE) for s in (0.01, 1.0, 10.0, 1e4)]
    assert needed == sorted(needed, reverse=True) and 0 <= needed[-1] < needed[0] < 1
    possible = [paper.overlap_possible(micro_step_seconds=s, **LINE) for s in (0.01, 1.0, 10.0)]
    assert possible == sorted(possible) and 0 < possible[0] < possible[-1] <= 1


def test_a_bucket_takes_one_collective_of_each_kind():
    """100 MiB of fp32 sums in buckets of 25 MiB are 4, and one element more is 5."""
    numel = 100 * 2**20 // 4
    steps = {"gradient_accumulation_steps": 8, "param_dtype": BF16, "reduce_dtype": torch.float32}
    for engine, each in zip(ENGINES, (1, 2, 1, 8, 8 * 3), strict=True):
        paper = cost(engine=engine, num_parameters=numel, **steps)
        assert paper.num_collectives == 4 * each
        assert dataclasses.replace(paper, num_parameters=numel + 1).num_collectives == 5 * each
        assert dataclasses.replace(paper, bucket_cap_mb=0.5).num_collectives == 200 * each
    kept = cost(engine="fsdp", num_parameters=numel, reshard_after_forward=False, **steps)
    assert kept.num_collectives == 4 * 8 * 2


@each_engine
def test_latency_counts_each_hop_of_each_bucket_and_of_the_control_messages(engine):
    """Without bytes to speak of: 3 hops a gather or scatter of 4 ranks, 6 an all-reduce."""
    numel = 100 * 2**20 // 4
    hops = {
        "all_reduce": 4 * 6 + 3,
        "reduce_scatter": 4 * (3 + 3) + 2 * 3,
        "ddp": 4 * 6,
        "ddp_every_micro_step": 8 * 4 * 6,
        "fsdp": 8 * 4 * (3 + 3 + 3),
    }
    paper = cost(engine=engine, num_parameters=numel, gradient_accumulation_steps=8)
    assert paper.wire_seconds(bandwidth=1e30, latency=1.0) == pytest.approx(hops[engine])


@pytest.mark.parametrize(("engine", "messages"), [*zip(ENGINES, (1, 2, 0, 0, 0), strict=True)])
def test_control_messages_are_12_numbers_of_8_bytes_to_each_other_rank(engine, messages):
    paper = cost(engine=engine, world_size=1024)
    assert paper.control_bytes == messages * 1023 * 136
    seconds = paper.wire_seconds(**LINE)
    assert seconds == pytest.approx((paper.wire_bytes + paper.control_bytes) / 1e9, rel=1e-12)


def test_overlap_by_hand():
    """4 GB/s and 4 ranks, 8e9 elements. Bytes: sums 4 n, so 3/4 of 32 GB take 6 s a way around."""
    of = {"num_parameters": 8 * 10**9, "gradient_accumulation_steps": 8}
    at = {"bandwidth": 4e9, "micro_step_seconds": 10.0}  # 80 s an update, 4 s of them allowed

    def both(**changes):
        paper = cost(**of, **changes)
        needed, possible = paper.overlap_needed(**at), paper.overlap_possible(**at)
        return pytest.approx(needed, abs=1e-6), pytest.approx(possible, abs=1e-6)

    assert both(engine="ddp") == (1 - 4 / 12, 20 / 3 / 12)  # backward has 6.67 of 12 s
    assert both(engine="all_reduce") == (1 - 4 / 12, 20 / 3 / 12)
    assert both(engine="ddp", param_dtype=BF16) == (1 - 4 / 6, 1)
    assert both(engine="reduce_scatter") == (1 - 4 / 12, 6 / 12)  # the gather is past backward
    assert both(engine="reduce_scatter", param_dtype=BF16) == (1 - 4 / 9, 6 / 9)
    assert both(engine="ddp_every_micro_step") == (1 - 4 / 96, 20 / 3 / 12)
    # forward has 3.33 s for a gather of 6, backward 6.67 for 6 and 6
    assert both(engine="fsdp") == (1 - 4 / 144, 10 / 18)
    assert both(engine="fsdp", reshard_after_forward=False) == (1 - 4 / 96, (10 / 3 + 6) / 12)
    ring = cost(**of)
    assert ring.overlap_needed(**at, max_share=0) == 1
    assert ring.overlap_needed(**at, max_share=0.075) == pytest.approx(0.5)
    assert ring.overlap_needed(**at, max_share=1) == 0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: cost(num_parameters=0), ValueError, "num_parameters must be 1 or more, got 0"),
        (lambda: cost(world_size=0), ValueError, "world_size must be 1 or more, got 0"),
        (lambda: cost(world_size=2.0), TypeError, "world_size must be an integer, got 2.0; "),
        (lambda: cost(gpus_per_node=True), TypeError, "must be an integer, got True"),
        (
            lambda: cost(world_size=12, gpus_per_node=8),
            ValueError,
            "world_size must be a multiple of gpus_per_node=8, got 12; pass gpus_per_node=1",
        ),
        (lambda: cost(engine="horovod"), ValueError, "one of all_reduce, .* got 'horovod'; "),
        (lambda: cost(param_dtype=2), TypeError, "param_dtype must be a .*, got 2; "),
        (lambda: cost(reduce_dtype=0), TypeError, "reduce_dtype must be a .*, got 0; "),
        (lambda: cost(reduce_dtype=torch.int8), TypeError, "got torch.int8; "),
        (
            lambda: cost(reshard_after_forward=False),
            ValueError,
            "reshard_after_forward must go with fsdp, got engine 'ddp'; leave it out",
        ),
        (lambda: cost(bucket_cap_mb=0), ValueError, "bucket_cap_mb must be positive and finite"),
        (lambda: cost(bucket_cap_mb="25"), TypeError, "must be a number, got '25'"),
        (lambda: cost().wire_seconds(bandwidth=0.0), ValueError, "bandwidth must be positive"),
        (lambda: cost().wire_seconds(bandwidth=float("nan")), ValueError, "got nan"),
        (lambda: cost().wire_seconds(bandwidth=1, latency=-1), ValueError, "latency must be 0 or"),
        (
            lambda: cost().overlap_needed(micro_step_seconds=0, **LINE),
            ValueError,
            "micro_step_seconds must be positive and finite, got 0",
        ),
        (
            lambda: cost().overlap_needed(micro_step_seconds=1, max_share=-0.1, **LINE),
            ValueError,
            "max_share must be 0 or more and finite, got -0.1",
        ),
        (
            lambda: cost().overlap_possible(micro_step_seconds=float("inf"), **LINE),
            ValueError,
            "micro_step_seconds must be positive and finite, got inf",
        ),
    ],
)
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=f"^ReductionCost: .*{message}"):
        call()
