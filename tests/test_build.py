"""Build and install: with a compiler and without, and never with torch."""

import email
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
BUILD_FILES = ["setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"]
BUILD_FOLDERS = ["stepclock_ext", "csrc"]
LEFT_OUT = "stepclock_ext: left out the C++ kernels"
CUDA_LEFT_OUT = "stepclock_ext: left out the CUDA kernels"
PIP_WHEEL = ["-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation", "-w", "dist", "."]

# What lets a compiler assume that NaN, infinity or the order of a sum do not matter, or that the
# machine that builds is the one that runs.
FORBIDDEN = ["-ffast-math", "-Ofast", "-ffinite-math-only", "-funsafe-math", "-fassociative-math"]
FORBIDDEN += ["-freciprocal-math", "-march=", "-mtune="]

# Loaded by every interpreter that a build starts, through PYTHONPATH.
TRIPWIRE = """
import sys
class Tripwire:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise RuntimeError("the build imported torch")
sys.meta_path.insert(0, Tripwire())
"""


def copy_tree(folder):
    """The files that a build reads, without anything that an earlier build left."""
    folder.mkdir()
    for name in BUILD_FILES:
        shutil.copy(ROOT / name, folder)
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    for name in BUILD_FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    return folder


def run(python, arguments, cwd, **variables):
    """Run an interpreter with no build variable set but those given; without CUDA unless asked."""
    unset = ("CXX", "STEPCLOCK_NATIVE", "STEPCLOCK_CUDA_ARCHS", "CUDA_HOME", "CUDA_PATH")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    kept["STEPCLOCK_CUDA"] = "0"
    return subprocess.run(
        [python, *arguments],
        cwd=cwd,
        env=kept | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # pip -v moves the output of a build from one to the other
        text=True,
    )


def lines_about_us(done):
    """The lines in which the build speaks for itself."""
    lines = [line.strip() for line in done.stdout.splitlines()]
    return [line for line in lines if line.startswith("stepclock_ext:")]


@pytest.fixture
def tree(tmp_path):
    """A checkout in which nothing has been built."""
    return copy_tree(tmp_path / "checkout")


@pytest.fixture
def no_compiler(tmp_path):
    """A PATH without a compiler."""
    folder = tmp_path / "empty"
    folder.mkdir()
    return {"PATH": str(folder)}


@pytest.fixture
def fresh_python(tmp_path):
    """The interpreter of a new environment that sees the packages of this one, after its own."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    site = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    here = [path for path in sys.path if path.endswith("-packages")]
    (site / "here.pth").write_text("\n".join(here), encoding="utf-8")
    return tmp_path / "venv" / "bin" / "python"


@dataclass(frozen=True)
class Built:
    """A checkout built twice under the tripwire, and what both builds printed."""

    tree: Path
    tripwire: dict
    first: subprocess.CompletedProcess
    second: subprocess.CompletedProcess

    @property
    def wheel(self):
        (path,) = (self.tree / "dist").iterdir()
        return path


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """One real build, shared: it takes most of the time of this file."""
    folder = tmp_path_factory.mktemp("built")
    (folder / "sitecustomize.py").write_text(TRIPWIRE, encoding="utf-8")
    tree = copy_tree(folder / "checkout")
    tripwire = {"PYTHONPATH": str(folder)}
    builds = [
        run(sys.executable, PIP_WHEEL, tree, STEPCLOCK_NATIVE="1", **tripwire) for _ in range(2)
    ]
    for done in builds:
        assert done.returncode == 0, done.stdout
    return Built(tree, tripwire, *builds)


def test_without_a_compiler_the_install_succeeds_and_says_so_once(tree, no_compiler, fresh_python):
    install = ["-m", "pip", "install", "-v", "--no-build-isolation", "--no-deps", "."]
    done = run(fresh_python, install, tree, **no_compiler)
    assert done.returncode == 0, done.stdout
    (line,) = lines_about_us(done)
    assert line.startswith(LEFT_OUT)
    assert "c++, g++ or clang++" in line

    code = (
        "import stepclock_ext as s; cpu = s.backends()['cpu']; print(s.__file__);"
        "print(cpu.available, bool(cpu.reason), s.backends()['reference'].available)"
    )
    used = run(fresh_python, ["-c", code], tree.parent)
    assert used.returncode == 0, used.stdout
    where, status = used.stdout.splitlines()
    assert where.startswith(str(fresh_python.parents[1]))
    assert status == "False True True"


def test_native_1_makes_a_missing_compiler_an_error_that_names_it(tree, no_compiler):
    done = run(sys.executable, PIP_WHEEL, tree, STEPCLOCK_NATIVE="1", **no_compiler)
    assert done.returncode != 0
    (line,) = lines_about_us(done)
    assert "no C++ compiler (c++, g++ or clang++)" in line
    assert "unset STEPCLOCK_NATIVE" in line


@pytest.mark.parametrize(
    ("variables", "num_lines"), [({"CXX": "false"}, 1), ({"STEPCLOCK_NATIVE": "0"}, 0)]
)
def test_what_is_not_built_leaves_no_older_module_behind(tree, variables, num_lines):
    probe = "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))"
    suffix = run(sys.executable, ["-c", probe], tree).stdout.strip()
    stale = tree / "stepclock_ext" / f"_C{suffix}"
    stale.touch()
    done = run(sys.executable, ["setup.py", "build_ext", "--inplace"], tree, **variables)
    assert done.returncode == 0, done.stdout
    assert len(lines_about_us(done)) == num_lines, done.stdout
    assert not stale.exists()


def test_an_unknown_value_of_the_switch_is_refused(tree):
    done = run(sys.executable, ["setup.py", "build_ext"], tree, STEPCLOCK_NATIVE="yes")
    assert done.returncode != 0
    assert "STEPCLOCK_NATIVE must be 0, 1 or unset, got yes" in done.stdout


def test_one_wheel_holds_the_kernels_and_the_types(built):
    names = zipfile.ZipFile(built.wheel).namelist()
    assert [name for name in names if re.fullmatch(r"stepclock_ext/_C\..*so", name)]
    assert "stepclock_ext/py.typed" in names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"stepclock_ext"}


def test_the_metadata_asks_for_torch_and_needs_none(built):
    with zipfile.ZipFile(built.wheel) as wheel:
        (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(wheel.read(name))
    assert "torch>=2.6" in metadata.get_all("Requires-Dist")
    assert metadata["Requires-Python"] == ">=3.10"


def test_the_module_links_no_library_of_torch(built, tmp_path):
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("readelf is not installed")
    with zipfile.ZipFile(built.wheel) as wheel:
        (name,) = (n for n in wheel.namelist() if n.endswith(".so"))
        module = wheel.extract(name, tmp_path)
    dynamic = subprocess.run([readelf, "-d", module], check=True, capture_output=True, text=True)
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic.stdout)
    assert needed
    assert not [n for n in needed if n.startswith(("libtorch", "libc10", "libpython"))]


def test_the_build_never_imports_torch(built):
    tripped = run(sys.executable, ["-c", "import torch"], built.tree, **built.tripwire)
    assert "the build imported torch" in tripped.stdout
    assert "the build imported torch" not in built.first.stdout


def test_a_second_build_compiles_nothing(built):
    assert "CXX build/" in built.first.stdout
    assert "no work to do" in built.second.stdout
    assert "CXX build/" not in built.second.stdout


def test_no_flag_assumes_that_nan_cannot_happen_or_ties_the_build_to_a_machine(built):
    (file,) = built.tree.glob("build/native-*/stepclock_ext._C/build.ninja")
    text = file.read_text(encoding="utf-8")
    assert "-ffp-contract=off" in text
    assert not [flag for flag in FORBIDDEN if flag in text]
