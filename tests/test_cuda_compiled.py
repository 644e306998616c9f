"""What nvcc makes of the CUDA kernels: registers, memory and the width of accesses."""

import importlib.util
import re
import shutil
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from cuda_build import CUDA, ROOT, SOURCES, change, run

pytestmark = pytest.mark.slow

FLAGS = [
    *("-std=c++17", "-O3", "-fmad=false", "-arch=sm_90", "-DSTEPCLOCK_ISA=gpu"),
    *("-cubin", "-Xptxas", "-v"),
]
ARCHS = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]
# The constant that holds each kernel's threads in a block.
THREADS = {
    "sum_squares_kernel": "kReduceThreads",
    "max_abs_kernel": "kReduceThreads",
    "coefficient_kernel": "kReduceThreads",
    "accumulate_kernel": "kAccumulateThreads",
    "scale_kernel": "kScaleThreads",
    "advance_steps_kernel": "kUpdateThreads",
    "adam_kernel": "kUpdateThreads",
    "sgd_kernel": "kUpdateThreads",
    "move_average_kernel": "kUpdateThreads",
}
# 16-byte loads and stores of one pack on the main path, in which nothing is chosen at run time.
SUMMED = "Known<float>, Known<float>, false>"
PACKS = {
    f"adam_kernel<PlainWeights<float>, {SUMMED}": (4, 3),
    f"adam_kernel<PlainWeights<BFloat16>, {SUMMED}": (7, 5),
    f"adam_kernel<PlainWeights<Float16>, {SUMMED}": (7, 5),
    f"adam_kernel<RemainderWeights, {SUMMED}": (8, 6),
    f"adam_kernel<CopyWeights, {SUMMED}": (8, 7),
    f"sgd_kernel<PlainWeights<float>, {SUMMED}": (3, 2),
    "accumulate_kernel<float, float>": (4, 2),
    "accumulate_kernel<float, BFloat16>": (3, 2),
    "accumulate_kernel<BFloat16, BFloat16>": (2, 1),
    "sum_squares_kernel<float>": (2, 0),
    "sum_squares_kernel<BFloat16>": (1, 0),
    "max_abs_kernel<float>": (1, 0),
    "scale_kernel<float>": (1, 1),
    "move_average_kernel<PlainWeights<float> >": (2, 1),
}


def find_nvcc():
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    return nvcc


def find_cuobjdump():
    """The one of the Triton package, which need not be imported."""
    triton = importlib.util.find_spec("triton")
    path = Path(triton.origin).with_name("backends") / "nvidia/bin/cuobjdump" if triton else None
    if path is None or not path.exists():
        pytest.skip("Triton's cuobjdump is not installed")
    return path


def demangle(text):
    """Names as they stand in the sources, without their namespaces."""
    if shutil.which("c++filt") is None:
        pytest.skip("c++filt is not installed")
    plain = subprocess.run(["c++filt"], input=text, capture_output=True, text=True, check=True)
    return re.sub(r"stepclock::|cuda::|gpu::|\(anonymous namespace\)::", "", plain.stdout)


@dataclass
class Kernel:
    """What the compiler reports of a kernel; and its instructions that touch memory, counted."""

    registers: int
    local_bytes: int  # stack frame and spills
    accesses: Counter


def compile_kernels(sources, folder, csrc=ROOT / "csrc"):
    """The kernels of `sources` by name."""
    nvcc = find_nvcc()

    def compile_one(source):
        cubin = folder / f"{source.stem}.cubin"
        return cubin, run([nvcc, *FLAGS, f"-I{csrc}", csrc / "cuda" / source.name, "-o", cubin])

    with ThreadPoolExecutor(2) as pool:
        compiled = list(pool.map(compile_one, sources))
    kernels = {}
    for cubin, report in compiled:
        accesses = read_accesses(run([find_cuobjdump(), "-sass", cubin]))
        for entry in demangle(report).split("Compiling entry function '")[1:]:
            name = entry.partition("'")[0].removeprefix("void ").partition("(")[0]
            frame = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", entry)
            (registers,) = re.findall(r"Used (\d+) registers", entry)
            kernels[name] = Kernel(int(registers), sum(map(int, frame)), accesses[name])
    return kernels


def read_accesses(sass):
    """Loads and stores of each kernel that a disassembly shows, those of shared memory apart."""
    pattern = re.compile(
        r"Function : (\w+)|/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?((?:LD|ST)[A-Z0-9_.]*)"
    )
    found, name = {}, None
    for match in pattern.finditer(sass):
        if match[1]:
            name = match[1]
            found[name] = Counter()
        elif not match[2].startswith(("LDC", "LDS", "STS")):
            found[name][match[2]] += 1
    names = demangle("\n".join(found)).splitlines()
    plain = (name.removeprefix("void ").partition("(")[0] for name in names)
    return dict(zip(plain, found.values(), strict=True))


def check_local_memory(kernels):
    assert not [name for name, kernel in kernels.items() if kernel.local_bytes]
    for name, kernel in kernels.items():
        assert not [op for op in kernel.accesses if op.startswith(("LDL", "STL"))], name


def check_space(kernels):
    """Addresses from a table must be known to be global: generic ones are looked up each time."""
    for name, kernel in kernels.items():
        assert not [op for op in kernel.accesses if not op.startswith(("LDG", "STG"))], name


def check_width(kernels):
    """A loop may be unrolled, so that its packs are there several times."""
    for name, (num_loads, num_stores) in PACKS.items():
        if name in kernels:
            accesses = kernels[name].accesses
            loads, stores = accesses["LDG.E.128"], accesses["STG.E.128"]
            assert loads and loads % num_loads == 0, f"{name}: {accesses}"
            assert stores * num_loads == loads * num_stores, f"{name}: {accesses}"


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """Every kernel, compiled for Hopper."""
    largest_first = sorted(SOURCES, key=lambda path: -path.stat().st_size)
    return compile_kernels(largest_first, tmp_path_factory.mktemp("compiled"))


def num_threads(name):
    """Threads in a block of a kernel."""
    constant = THREADS[name.partition("<")[0]]
    files = [*SOURCES, *CUDA.glob("*.h")]
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    return int(re.search(rf"constexpr int {constant} = (\d+);", text)[1])


def occupancy(registers, threads):
    """The share of 2048 threads that 65536 registers allow, given out by 256 to a warp."""
    warps = 65536 // (-(-registers * 32 // 256) * 256)
    blocks = min(warps // (threads // 32), 2048 // threads, 32)
    return blocks * threads / 2048


def test_every_kernel_is_compiled(kernels):
    assert {name.partition("<")[0] for name in kernels} == set(THREADS)
    assert set(PACKS) <= set(kernels)


def test_nothing_spills_and_nothing_lies_in_local_memory(kernels):
    check_local_memory(kernels)


def test_registers_leave_room_for_half_of_the_threads(kernels):
    found = {name: occupancy(k.registers, num_threads(name)) for name, k in kernels.items()}
    assert min(found.values()) >= 0.5, found


def test_the_main_path_loads_and_stores_sixteen_bytes_at_a_time(kernels):
    check_width(kernels)


def test_every_access_is_known_to_be_of_global_memory(kernels):
    check_space(kernels)


@pytest.mark.parametrize(
    ("check", "file", "old", "new"),
    [
        (check_space, "table.h", "return as_global(", "return ("),
        (check_width, "packs.h", "kVectorBytes = 16", "kVectorBytes = 8"),
        (check_local_memory, "packs.h", "values[k] = raw[k];", "values[k] = raw[(k + i) % N];"),
    ],
    ids=["address space", "width", "local memory"],
)
def test_the_check_sees_a_kernel_that_is_broken_on_purpose(tmp_path, check, file, old, new):
    csrc = change(tmp_path, file, old, new)
    broken = compile_kernels([CUDA / "accumulate.cu"], tmp_path, csrc)
    with pytest.raises(AssertionError):
        check(broken)


def check_every_architecture(module):
    """The kernels of a built module: no spill and at most 64 registers anywhere, and PTX."""
    usage = run([find_cuobjdump(), "-res-usage", module])
    parts = re.split(r"arch = (sm_\d+)\n", usage)[1:]
    found = {}
    for arch, part in zip(parts[::2], parts[1::2], strict=True):
        for name, registers, stack, local in re.findall(
            r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", part
        ):
            found.setdefault(arch, {})[name] = int(registers), int(stack) + int(local)
    assert sorted(found) == sorted(ARCHS)
    for arch, kernels in found.items():
        assert len(kernels) == len(found["sm_90"])
        for name, (registers, local_bytes) in kernels.items():
            assert registers <= 64, (arch, name)
            assert local_bytes == 0, (arch, name)
    assert "sm_120" in run([find_cuobjdump(), "-lptx", module])
