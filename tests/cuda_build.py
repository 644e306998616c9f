"""The CUDA kernels compiled for the CPU, with the simulator of tests/cuda in CUDA's place."""

import atexit
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CUDA = ROOT / "csrc" / "cuda"
SOURCES = sorted(CUDA.glob("*.cu"))
WRAPPER = ROOT / "tests" / "cuda" / "simulated.cpp"
FLAGS = [
    *("-std=c++17", "-fPIC", "-fvisibility=hidden", "-pthread", "-fno-strict-aliasing"),
    *("-ffp-contract=off", "-U_FORTIFY_SOURCE", "-Wall", "-Wextra", "-Werror"),
    *("-Wno-unknown-pragmas", "-Wno-maybe-uninitialized"),  # unroll; arrays filled under a flag
    *("-DSTEPCLOCK_SIMULATOR", "-DSTEPCLOCK_ISA=gpu"),
]


def find_compiler():
    """g++, or a skip: clang has no use for a file of CUDA as plain C++."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    return compiler


def compile_sources(sources, folder, *options, csrc=ROOT / "csrc"):
    """Objects of `sources` for the simulator, two compilers at a time."""
    includes = [f"-I{csrc / 'cuda'}", f"-I{csrc}", f"-I{WRAPPER.parent}"]

    def compile_one(source):
        output = folder / f"{Path(source).stem}.o"
        language = ["-x", "c++", "-c", source, "-o", output]
        run([find_compiler(), *FLAGS, *options, *includes, *language])
        return output

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compile_one, sources))


def precompile(folder, *options):
    """`options`, and those that spare each compilation half a second for the simulator's header."""
    header = shutil.copy(WRAPPER.with_name("cuda_simulator.h"), folder)
    run([find_compiler(), *FLAGS, *options, "-x", "c++-header", header, "-o", f"{header}.gch"])
    return [*options, f"-I{folder}", "-include", Path(header).name]


@lru_cache(maxsize=1)
def built_objects():
    """The objects of the kernels as they are; of ``simulated.cpp`` last."""
    folder = Path(tempfile.mkdtemp(prefix="stepclock_simulated_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return compile_sources([*SOURCES, WRAPPER], folder, "-O1")


@lru_cache(maxsize=1)
def built_library():
    """The library of the kernels as they are."""
    objects = built_objects()
    return link(objects, objects[0].with_name("simulated.so"))


def link(objects, output, *options):
    """A library of `objects`; what two of them define is taken from the first."""
    run([find_compiler(), "-shared", "-pthread", *options, *objects, "-o", output])
    return output


def change(folder, file, old, new, place=0):
    """A copy of csrc in `folder` with one text of a CUDA file changed, the first or a later one."""
    csrc = folder / "csrc"
    shutil.copytree(ROOT / "csrc", csrc)
    path = csrc / "cuda" / file
    parts = path.read_text(encoding="utf-8").split(old)
    assert len(parts) > place + 1, f"{old!r} no longer stands in {file}"
    text = old.join(parts[: place + 1]) + new + old.join(parts[place + 1 :])
    path.write_text(text, encoding="utf-8")
    return csrc


def run(command):
    """Runs a command, which must succeed; its output."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"{command}:\n{done.stdout}"
    return done.stdout
