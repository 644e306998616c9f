"""The CUDA kernels broken on purpose, one line at a time: each time a check of this file fails."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat

import pytest
import torch
from cuda_build import built_library, built_objects, change, compile_sources, link, precompile
from fused import adam
from simulated import COLUMNS, SimulatedBackend, SimulatorError, assert_same, gated_update, rows_on
from tensors import BACKENDS, clones, coefficient_stats, random_list
from tolerance import assert_all_bit_equal, assert_bit_equal, assert_close

from stepclock_ext import ops

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("cpu" not in BACKENDS, reason="the kernels were not built"),
]

SIZES = [1, 257, 4097, 16_385, 40_001]
FP32 = (torch.float32,) * 3
BF16 = (torch.bfloat16, torch.float32, torch.float32)


def check_sums(backend):
    for unaligned in (False, True):
        tensors = random_list(SIZES, torch.float32, unaligned=unaligned)
        layouts = [ops.Layout.of(b, tensors) for b in (backend, ops.make_backend("cpu"))]
        slots = [ops.make_slots(layout.num_slots) for layout in layouts]
        for into, layout in zip(slots, layouts, strict=True):
            ops.sum_squares_(into, tensors, layout)
        assert_close(slots[0] / slots[1], torch.ones_like(slots[1]), num_roundings=16_384)


def check_maxima(backend):
    tensors = random_list(SIZES, torch.float32)
    tensors[-1][77] = math.nan
    slots = []
    for each in (backend, ops.make_backend("cpu")):
        layout = ops.Layout.of(each, tensors)
        slots.append(ops.make_slots(layout.num_slots))
        ops.max_abs_(slots[-1], tensors, layout)
    assert_bit_equal(*slots)


def check_accumulation(backend):
    for unaligned in (False, True):
        sums = random_list(SIZES, torch.float32, seed=1)
        grads = random_list(SIZES, torch.float32, seed=2, unaligned=unaligned)
        expected = [s + g for s, g in zip(sums, grads, strict=True)]
        layout = ops.Layout.of(backend, grads)
        slots = [ops.make_slots(layout.num_slots) for _ in range(4)]
        ops.accumulate_(sums, grads, layout, slots=slots[0], grad_slots=slots[1])
        assert_all_bit_equal(sums, expected)
        for into, tensors in zip(slots[2:], (sums, grads), strict=True):
            ops.sum_squares_(into, tensors, ops.Layout.of(ops.make_backend("cpu"), grads))
        for got, want in zip(slots[:2], slots[2:], strict=True):
            assert_close(got / want, torch.ones_like(want), num_roundings=16_384)


def check_scale(backend):
    for unaligned in (False, True):
        tensors = random_list(SIZES, torch.float32, unaligned=unaligned)
        others = clones(tensors)
        ops.scale_(tensors, coefficient_stats(2.0), ops.Layout.of(backend, tensors))
        assert_all_bit_equal(tensors, [2 * t for t in others])


def check_scale_beyond_32_bits(backend):
    def move_away(chunks, num_elements, addresses):
        chunks[:, 1] += 2**31
        num_elements += 2**31
        addresses -= torch.where(addresses != 0, 4 * 2**31, 0)

    backend.alter = move_away
    check_scale(backend)


def check_coefficient(backend):
    for num_slots in (5_000, 300):
        (slots,) = random_list([num_slots], torch.float64)
        slots.square_()
        stats, layout = torch.full((3,), -7.0, dtype=torch.float64), ops.Layout.of(backend, [])
        ops.coefficient_(stats, slots, layout, divisor=1.0, max_norm=math.inf)
        norm = torch.tensor([math.sqrt(math.fsum(slots.tolist())), 1, 1], dtype=torch.float64)
        assert_close(stats, norm, num_roundings=num_slots)


def check_adam(backend):
    for column in COLUMNS:
        assert_same(backend, SIZES, BF16, adam, masters=True, averages=True, misaligned=column)


def check_rounding(backend):
    assert_same(backend, SIZES, BF16, adam, companions={"rounding_key": 2**63 + 11})


def check_gates(backend):
    for update in ("adam", "sgd", "average"):
        rows = rows_on(backend, [257], FP32, averages=True)
        before = clones(rows.written())
        gated_update(rows, update, math.inf)
        assert_all_bit_equal(rows.written(), before)


@dataclass(frozen=True)
class Mutation:
    """A line of a file changed, in the kernels of `source`, and the check that must see it."""

    file: str
    old: str
    new: str
    source: str
    check: object
    place: int = 0  # which of the places where the line stands


GATE = "if (is_shut(l.companions, stats)) return;\n"
TAIL = "for (int64_t i = num_packs * kPack + threadIdx.x; i < span.num_elements;"
NO_TAIL = "for (int64_t i = num_packs * kPack + threadIdx.x; i < num_packs * kPack;"
OFFSET = "x + i * static_cast<int64_t>(sizeof(T))"
SHORT = "x + static_cast<int32_t>(i * static_cast<int64_t>(sizeof(T)))"
MUTATIONS = {
    "barrier before the last warp dropped": Mutation(
        "device.h", "= value;\n  __syncthreads();", "= value;", "reduce", check_sums
    ),
    "barrier behind the last warp dropped": Mutation(
        "device.h", "__syncthreads();  // shared", "// shared", "accumulate", check_accumulation
    ),
    "barrier before the last block dropped": Mutation(
        "reduce.cu", "__syncthreads();\n  if (!is", "if (!is", "reduce", check_coefficient
    ),
    "shuffles end one too early": Mutation(
        "device.h", "offset > 0; offset", "offset > 1; offset", "reduce", check_sums
    ),
    "NaN is smaller": Mutation("device.h", "a > b || a != a", "a > b", "reduce", check_maxima),
    "one pack too many": Mutation(
        "packs.h",
        "? span.num_elements / kPack",
        "? span.num_elements / kPack + 1",
        "accumulate",
        check_scale,
    ),
    "tail of an update forgotten": Mutation("packs.h", TAIL, NO_TAIL, "accumulate", check_scale),
    "tail of a sum forgotten": Mutation("packs.h", TAIL, NO_TAIL, "reduce", check_sums, place=1),
    "part of a chunk forgotten": Mutation(
        "accumulate.cu",
        "section.num_chunks * kScaleParts",
        "section.num_chunks * 3",
        "accumulate",
        check_scale,
    ),
    "begin in 32 bits": Mutation(
        "table.h",
        "chunk[1] + offset,",
        "static_cast<int32_t>(chunk[1] + offset),",
        "accumulate",
        check_scale_beyond_32_bits,
    ),
    "loads in 32 bits": Mutation(
        "packs.h", OFFSET, SHORT, "accumulate", check_scale_beyond_32_bits
    ),
    "stores in 32 bits": Mutation(
        "packs.h", OFFSET, SHORT, "accumulate", check_scale_beyond_32_bits, place=1
    ),
    "alignment taken for granted": Mutation(
        "packs.h", "% kVectorBytes == 0", "% 1 == 0", "accumulate", check_scale
    ),
    "alignment of gradients taken for granted": Mutation(
        "accumulate.cu", " && is_aligned(grad)", "", "accumulate", check_accumulation
    ),
    "alignment of moments taken for granted": Mutation(
        "adam.cu", " && is_aligned(moments.exp_avg)", "", "adam", check_adam
    ),
    "last block off by one": Mutation(
        "reduce.cu", "1ull) + 1 == gridDim.x", "1ull) == gridDim.x", "reduce", check_coefficient
    ),
    "count of blocks not set back": Mutation(
        "reduce.cu", "scratch->num_done = 0;", "", "reduce", check_coefficient
    ),
    "gate of the steps left out": Mutation(
        "adam.cu", " || is_shut(companions, stats)", "", "adam", check_gates
    ),
    "gate of Adam left out": Mutation("adam.cu", GATE, "", "adam", check_gates),
    "gate of SGD left out": Mutation("sgd.cu", GATE, "", "sgd", check_gates),
    "gate of averages left out": Mutation(
        "average.cu", "if (is_shut(companions, stats)) return;\n", "", "average", check_gates
    ),
    "rounding key without the slot": Mutation(
        "adam.cu", "rounding_key, span.slot)", "rounding_key, 0)", "adam", check_rounding
    ),
    "random bits without the part": Mutation(
        "adam.cu", "span.offset + i - span.begin", "i - span.begin", "adam", check_rounding
    ),
}


def mutate(mutation, folder, options):
    """The library of the kernels with one mutation."""
    csrc = change(folder, mutation.file, mutation.old, mutation.new, mutation.place)
    source = csrc / "cuda" / f"{mutation.source}.cu"
    (changed,) = compile_sources([source], folder, *options, csrc=csrc)
    kept = [path for path in built_objects() if path.stem != mutation.source]
    return link([changed, *kept], folder / "mutant.so")  # the first definition is taken


@pytest.fixture(scope="module")
def mutants(tmp_path_factory):
    """The library of each mutation."""
    built_objects()
    options = precompile(tmp_path_factory.mktemp("precompiled"), "-O0", "-w")
    folders = [tmp_path_factory.mktemp("mutant") for _ in MUTATIONS]
    with ThreadPoolExecutor(2) as pool:
        libraries = pool.map(mutate, MUTATIONS.values(), folders, repeat(options))
        return dict(zip(MUTATIONS, libraries, strict=True))


def run_check(check, library):
    """One check in both orders of blocks and threads."""
    for blocks, threads in [(0, 0), (1, 1)]:
        backend = SimulatedBackend(library)
        backend.set_order(blocks=blocks, threads=threads)
        check(backend)


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_mutation_is_caught(mutants, name):
    with pytest.raises((AssertionError, SimulatorError)):
        run_check(MUTATIONS[name].check, mutants[name])


@pytest.mark.parametrize("check", sorted({m.check for m in MUTATIONS.values()}, key=str))
def test_the_kernels_as_they_are_pass_the_check(check):
    run_check(check, built_library())
