"""Builds the native modules through ninja; needs a C++ compiler, pybind11 and ninja, never torch.

STEPCLOCK_NATIVE unset: what cannot be built is left out, and one line on stderr says so.
STEPCLOCK_NATIVE=1: what cannot be built is an error.
STEPCLOCK_NATIVE=0: nothing is built.

A further module is a further entry in TARGETS: its sources, and the function that writes its edges.
"""

import os
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


class CannotBuildError(Exception):
    """A module cannot be built here: what is missing, and what to do about it."""

    def __init__(self, what: str, way_out: str) -> None:
        super().__init__(what)
        self.way_out = way_out


@dataclass(frozen=True)
class Target:
    """One native module: its sources, and the function that writes its edges into a ninja file."""

    title: str
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


def sources_in(folder: str, pattern: str) -> list[str]:
    """The files of a folder of csrc that match, relative to the root, in a fixed order."""
    return sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / folder).glob(pattern))


TARGETS = {
    "stepclock_ext._C": Target("the C++ kernels", sources_in("csrc/cpu", "*.cpp"), write_cpu),
}


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
        asked = os.environ.get("STEPCLOCK_NATIVE", "")
        if asked not in ("", "0", "1"):
            raise SystemExit(f"stepclock_ext: STEPCLOCK_NATIVE must be 0, 1 or unset, got {asked}")
        if asked == "0":
            return
        title = TARGETS[ext.name].title
        try:
            built = self.run_ninja(ext.name)
        except CannotBuildError as e:
            if asked == "1":
                message = f"stepclock_ext: STEPCLOCK_NATIVE=1 asks for {title}, but {e}"
                raise SystemExit(f"{message}; {e.way_out}, or unset STEPCLOCK_NATIVE") from e
            message = f"stepclock_ext: left out {title} (plain PyTorch does their work): {e}"
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
