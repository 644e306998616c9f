"""Builds the native modules through ninja; needs a C++ compiler, pybind11 and ninja, never torch.

STEPCLOCK_NATIVE, the C++ kernels; unset: where they cannot be built they are left out, and one line
on stderr says so; 1: that is an error; 0: nothing native is built.
STEPCLOCK_CUDA, the CUDA kernels: auto (or unset), 1 and 0 likewise. They are built where nvcc is
found, whether the machine has a GPU or not, for STEPCLOCK_CUDA_ARCHS ("80;90"; the last one also as
PTX for whatever comes after it).

A further module is a further entry in TARGETS: its sources, and the function that writes its edges.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

if TYPE_CHECKING:
    from ninja import Writer

ROOT = Path(__file__).resolve().parent

# No flag here lets the compiler assume that NaN or infinity cannot happen: both are looked for.
# -ffp-contract=off: the same bits from every instruction set, with or without fused multiply-add.
CXX_FLAGS = (
    "-O3 -std=c++17 -fPIC -fvisibility=hidden -pthread -Wall -Wextra -Werror=return-type "
    "-ffp-contract=off -fno-math-errno -fno-trapping-math"
)
LINK_FLAGS = "-shared -pthread -ldl"
if sys.platform == "darwin":
    LINK_FLAGS += " -undefined dynamic_lookup"  # Python's symbols come from the interpreter

# The kernels are compiled once for each of these; launch.cpp chooses among them at run time.
ISA_FLAGS = {"baseline": ""}
IS_X86_64 = sysconfig.get_platform().endswith(("x86_64", "amd64"))
if IS_X86_64:
    ISA_FLAGS["avx2"] = "-mavx2 -mf16c -mprefer-vector-width=256"
    ISA_FLAGS["avx512"] = "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512"


# -fmad=false: the bits of the CPU. The runtime is linked in, so nvcc's version need not be torch's.
NVCC_FLAGS = "-O3 -std=c++17 -fmad=false -DSTEPCLOCK_ISA=gpu -Xcompiler -fPIC,-fvisibility=hidden"
NVCC_LINK_FLAGS = "-shared --cudart static"
# Older ones have no -std=c++17 for device code that is worth building for.
MIN_NVCC = (12, 0)
# Ampere, Ada, Hopper and both Blackwells, as far as the compiler knows them.
CUDA_ARCHS = "80;86;89;90;100;120"


class CannotBuildError(Exception):
    """A module cannot be built here: what is missing, and what to do about it."""

    def __init__(self, what: str, way_out: str) -> None:
        super().__init__(what)
        self.way_out = way_out


@dataclass(frozen=True)
class Target:
    """One native module: its sources, and the function that writes its edges into a ninja file."""

    title: str
    switch: str
    sources: list[str]
    write: Callable[["Writer", list[str], Path, str], None]


def find_compiler() -> str:
    """The C++ compiler's command: $CXX, or the first of c++, g++, clang++ on PATH."""
    asked = os.environ.get("CXX", "").strip()
    for name in [asked] if asked else ["c++", "g++", "clang++"]:
        if shutil.which(shlex.split(name)[0]):
            return name
    names = f"CXX={asked}" if asked else "c++, g++ or clang++"
    raise CannotBuildError(f"no C++ compiler ({names}) is on PATH", "install one or set CXX")


def link_includes(build_dir: Path) -> str:
    """Flags for the headers of Python and pybind11, equal from build to build.

    An isolated build keeps pybind11 in a folder that is new each time. A link that carries only its
    version stands in for that folder, and as a system header it is not in the dependencies: so
    nothing is compiled again until pybind11's version changes.
    """
    try:
        import pybind11
    except ModuleNotFoundError as e:
        raise CannotBuildError("pybind11 is not installed", "pip install pybind11") from e
    python = sysconfig.get_paths()["include"]
    if not Path(python, "Python.h").is_file():
        raise CannotBuildError(
            f"Python's headers are not in {python}", "install them (python3-dev on Debian)"
        )
    link = build_dir / f"pybind11-{pybind11.__version__}"
    link.unlink(missing_ok=True)
    link.symlink_to(pybind11.get_include())
    return f"-isystem {shlex.quote(python)} -isystem {link.relative_to(ROOT).as_posix()}"


def write_cpu(ninja: "Writer", sources: list[str], build_dir: Path, module: str) -> None:
    """Write the edges of the C++ kernels: every file once, kernels.cpp once per instruction set."""
    ninja.variable("cxx", find_compiler())
    ninja.variable("cxxflags", f"{CXX_FLAGS} -Icsrc {link_includes(build_dir)}")
    ninja.rule(
        "cxx",
        "$cxx -MMD -MF $out.d $cxxflags $flags -c $in -o $out",
        description="CXX $out",
        depfile="$out.d",
        deps="gcc",
    )
    ninja.rule("link", f"$cxx $in -o $out {LINK_FLAGS}", description="LINK $out")
    objects = []
    for source in sources:
        if source.endswith("/kernels.cpp"):
            variants = {f"kernels.{i}.o": f"-DSTEPCLOCK_ISA={i} {f}" for i, f in ISA_FLAGS.items()}
        else:
            variants = {f"{Path(source).stem}.o": "-DSTEPCLOCK_X86=1" if IS_X86_64 else ""}
        for name, flags in variants.items():
            objects.append(f"$builddir/{name}")
            ninja.build(objects[-1], "cxx", source, variables={"flags": flags})
    ninja.build(module, "link", objects)


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler: its path, and its version as two numbers."""

    path: str
    version: tuple[int, int]


def find_nvcc() -> Nvcc:
    """The compiler of $CUDA_HOME, on PATH, or in /usr/local/cuda."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [f"{home}/bin"] if home else [None, "/usr/local/cuda/bin"]
    path = next((found for place in places if (found := shutil.which("nvcc", path=place))), None)
    if path is None:
        where = f"in CUDA_HOME={home}" if home else "on PATH or in /usr/local/cuda"
        raise CannotBuildError(f"no nvcc {where}", "install the CUDA toolkit or set CUDA_HOME")
    told = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    release = re.search(r"release (\d+)\.(\d+)", told)
    version = (int(release[1]), int(release[2])) if release else (0, 0)
    if version < MIN_NVCC:
        found, least = (".".join(map(str, numbers)) for numbers in (version, MIN_NVCC))
        raise CannotBuildError(
            f"nvcc {found} at {path} is older than {least}", "install a newer CUDA toolkit"
        )
    return Nvcc(path, version)


def choose_archs(nvcc: Nvcc) -> list[str]:
    """What is asked for, or what the compiler knows of our own list."""
    asked = os.environ.get("STEPCLOCK_CUDA_ARCHS", "").strip()
    wanted = [arch for arch in re.split(r"[;,\s]+", asked or CUDA_ARCHS) if arch]
    told = subprocess.run([nvcc.path, "--list-gpu-arch"], capture_output=True, text=True).stdout
    known = {line.strip().removeprefix("compute_") for line in told.splitlines()}
    unknown = [arch for arch in wanted if arch not in known]
    if asked and unknown:
        version = ".".join(map(str, nvcc.version))
        raise CannotBuildError(
            f"nvcc {version} does not know {', '.join(unknown)} of STEPCLOCK_CUDA_ARCHS={asked}",
            "leave them out",
        )
    return [arch for arch in wanted if arch in known]


def write_cuda(ninja: "Writer", sources: list[str], build_dir: Path, module: str) -> None:
    """Write the edges of the CUDA kernels; the binding is C++ and goes through nvcc as well."""
    nvcc = find_nvcc()
    archs = choose_archs(nvcc)
    codes = [f"-gencode arch=compute_{arch},code=sm_{arch}" for arch in archs]
    codes.append(f"-gencode arch=compute_{archs[-1]},code=compute_{archs[-1]}")
    ninja.variable("nvcc", f"{shlex.quote(nvcc.path)} -ccbin {shlex.quote(find_compiler())}")
    ninja.variable("nvccflags", f"{NVCC_FLAGS} -Icsrc {link_includes(build_dir)}")
    ninja.variable("codes", " ".join(codes))
    ninja.rule(
        "nvcc",
        "$nvcc -MD -MF $out.d $nvccflags $flags -c $in -o $out",
        description="NVCC $out",
        depfile="$out.d",
        deps="gcc",
    )
    ninja.rule("link", f"$nvcc {NVCC_LINK_FLAGS} $in -o $out", description="LINK $out")
    objects = []
    for source in sources:
        is_binding = source.endswith(".cpp")
        listed = f"-DSTEPCLOCK_CUDA_ARCHS='\\\"{' '.join(archs)}\\\"'"
        objects.append(f"$builddir/{Path(source).stem}.o")
        flags = listed if is_binding else "$codes"
        ninja.build(objects[-1], "nvcc", source, variables={"flags": flags})
    ninja.build(module, "link", objects)


def sources_in(folder: str, pattern: str) -> list[str]:
    """The files of a folder of csrc that match, relative to the root, in a fixed order."""
    return sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / folder).glob(pattern))


TARGETS = {
    "stepclock_ext._C": Target(
        "the C++ kernels", "STEPCLOCK_NATIVE", sources_in("csrc/cpu", "*.cpp"), write_cpu
    ),
    "stepclock_ext._CUDA": Target(
        "the CUDA kernels",
        "STEPCLOCK_CUDA",
        [*sources_in("csrc/cuda", "*.cu"), *sources_in("csrc/cuda", "*.cpp")],
        write_cuda,
    ),
}


def read_switch(name: str) -> str:
    """What a switch asks for: "0", "1", or "" for what can be built."""
    asked = os.environ.get(name, "")
    if asked == "auto" and name == "STEPCLOCK_CUDA":
        return ""
    if asked not in ("", "0", "1"):
        others = "0, 1, auto or unset" if name == "STEPCLOCK_CUDA" else "0, 1 or unset"
        raise SystemExit(f"stepclock_ext: {name} must be {others}, got {asked}")
    return asked


class NinjaBuild(build_ext):
    """build_ext that hands each module to ninja, in a build folder that outlives the command."""

    def finalize_options(self) -> None:
        """Keep objects in the tree: pip's own choice for an editable install is a new folder."""
        super().finalize_options()
        soabi = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
        self.build_temp = str(ROOT / "build" / f"native-{soabi}")

    def run(self) -> None:
        """Build; a module of an earlier build must not stay beside sources it does not fit."""
        for ext in self.extensions:
            Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
        super().run()

    def build_extension(self, ext: Extension) -> None:
        """Build one module, or say in one line why it is left out."""
        output = Path(self.get_ext_fullpath(ext.name))
        output.unlink(missing_ok=True)
        target = TARGETS[ext.name]
        title, asked = target.title, read_switch(target.switch)
        if asked == "0" or read_switch("STEPCLOCK_NATIVE") == "0":
            return
        try:
            built = self.run_ninja(ext.name)
        except CannotBuildError as e:
            if asked == "1":
                message = f"stepclock_ext: {target.switch}=1 asks for {title}, but {e}"
                raise SystemExit(f"{message}; {e.way_out}, or unset {target.switch}") from e
            message = f"stepclock_ext: left out {title} (other backends do their work): {e}"
            print(f"{message}; {e.way_out}, then install again", file=sys.stderr)
            return
        output.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(built, output)

    def run_ninja(self, name: str) -> Path:
        """Write the ninja file of one module, run it from the root and return the module's path."""
        try:
            import ninja
        except ModuleNotFoundError as e:
            raise CannotBuildError("ninja is not installed", "pip install ninja") from e
        target = TARGETS[name]
        build_dir = Path(self.build_temp) / name
        build_dir.mkdir(parents=True, exist_ok=True)
        module = build_dir / Path(self.get_ext_filename(name)).name
        with (build_dir / "build.ninja").open("w", encoding="utf-8") as file:
            writer = ninja.Writer(file)
            writer.variable("builddir", build_dir.relative_to(ROOT).as_posix())
            target.write(writer, target.sources, build_dir, f"$builddir/{module.name}")
        sys.stdout.flush()
        path = os.pathsep.join([ninja.BIN_DIR, os.environ.get("PATH", "")])
        command = [shutil.which("ninja", path=path) or "ninja", "-f", file.name]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            raise CannotBuildError(
                "the build failed", "see the compiler's output above (pip shows it with -v)"
            )
        return module


setup(
    cmdclass={"build_ext": NinjaBuild},
    # optional: setuptools does not miss the file of a module that was left out.
    ext_modules=[Extension(n, t.sources, optional=True) for n, t in TARGETS.items()],
)
