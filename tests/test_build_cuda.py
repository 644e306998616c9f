"""The CUDA kernels in a build: with nvcc, with none, and with one that is too old."""

import re
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from test_build import CUDA_LEFT_OUT, PIP_WHEEL, copy_tree, lines_about_us, run
from test_cuda_compiled import check_every_architecture

pytestmark = pytest.mark.slow

NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
OLD_NVCC = """#!/bin/sh
echo "nvcc: NVIDIA (R) Cuda compiler driver"
echo "Cuda compilation tools, release 11.5, V11.5.119"
"""
BUILD = ["setup.py", "build_ext", "--inplace"]


@pytest.fixture
def tree(tmp_path):
    """A checkout in which nothing has been built, and whose C++ kernels are left out of it."""
    return copy_tree(tmp_path / "checkout")


@pytest.fixture
def old_toolkit(tmp_path):
    """A CUDA_HOME with an nvcc of 2021."""
    binary = tmp_path / "cuda-11.5" / "bin" / "nvcc"
    binary.parent.mkdir(parents=True)
    binary.write_text(OLD_NVCC, encoding="utf-8")
    binary.chmod(binary.stat().st_mode | stat.S_IXUSR)
    return str(binary.parents[1])


def build_cuda_alone(tree, **variables):
    """A build whose C++ compiler compiles nothing: what it says of CUDA is what matters."""
    return run(sys.executable, BUILD, tree, CXX="false", **variables)


@pytest.mark.parametrize("asked", ["", "auto"])
def test_an_nvcc_that_is_too_old_costs_one_line(tree, old_toolkit, asked):
    done = build_cuda_alone(tree, STEPCLOCK_CUDA=asked, CUDA_HOME=old_toolkit)
    assert done.returncode == 0, done.stdout
    (line,) = [line for line in lines_about_us(done) if "CUDA" in line]
    assert line.startswith(CUDA_LEFT_OUT)
    assert "nvcc 11.5" in line
    assert "older than 12.0" in line


def test_where_cuda_is_asked_for_an_old_nvcc_is_an_error_that_names_both_versions(
    tree, old_toolkit
):
    done = build_cuda_alone(tree, STEPCLOCK_CUDA="1", CUDA_HOME=old_toolkit)
    assert done.returncode != 0
    line = lines_about_us(done)[-1]
    assert line.startswith("stepclock_ext: STEPCLOCK_CUDA=1 asks for the CUDA kernels")
    assert "nvcc 11.5" in line
    assert "12.0" in line


def test_a_missing_nvcc_costs_one_line_or_is_the_error_that_was_asked_for(tree, tmp_path):
    empty = str(tmp_path / "no toolkit")
    done = build_cuda_alone(tree, STEPCLOCK_CUDA="auto", CUDA_HOME=empty)
    assert done.returncode == 0, done.stdout
    (line,) = [line for line in lines_about_us(done) if "CUDA" in line]
    assert line.startswith(CUDA_LEFT_OUT)
    assert f"no nvcc in CUDA_HOME={empty}" in line
    done = build_cuda_alone(tree, STEPCLOCK_CUDA="1", CUDA_HOME=empty)
    assert done.returncode != 0
    assert "no nvcc" in lines_about_us(done)[-1]


def test_without_cuda_nothing_is_said_about_it(tree):
    done = build_cuda_alone(tree, STEPCLOCK_CUDA="0")
    assert done.returncode == 0, done.stdout
    assert not [line for line in lines_about_us(done) if "CUDA" in line]


def test_an_unknown_value_of_the_switch_is_refused(tree):
    done = build_cuda_alone(tree, STEPCLOCK_CUDA="yes")
    assert done.returncode != 0
    assert "STEPCLOCK_CUDA must be 0, 1, auto or unset, got yes" in done.stdout


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
def test_an_architecture_that_nvcc_does_not_know_is_named(tree):
    done = build_cuda_alone(tree, STEPCLOCK_CUDA="1", STEPCLOCK_CUDA_ARCHS="90;999")
    assert done.returncode != 0
    assert "does not know 999 of STEPCLOCK_CUDA_ARCHS=90;999" in lines_about_us(done)[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel with CUDA kernels for every architecture of the default."""
    if NVCC is None:
        pytest.skip("nvcc is not installed")
    tree = copy_tree(tmp_path_factory.mktemp("cuda") / "checkout")
    done = run(sys.executable, PIP_WHEEL, tree, STEPCLOCK_NATIVE="1", STEPCLOCK_CUDA="1")
    assert done.returncode == 0, done.stdout
    (path,) = (tree / "dist").iterdir()
    return path


def test_the_cuda_module_imports_without_a_driver_and_says_what_it_was_built_for(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "from stepclock_ext import _CUDA as c; print(c.ARCHS); print(c.TOOLKIT)"
    used = run(sys.executable, ["-c", code], tmp_path, PYTHONPATH=str(tmp_path))
    assert used.returncode == 0, used.stdout
    archs, toolkit = used.stdout.splitlines()
    assert archs == "80 86 89 90 100 120"
    assert int(toolkit) >= 12000


@pytest.fixture(scope="module")
def module(wheel, tmp_path_factory):
    """The CUDA module of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if Path(n).name.startswith("_CUDA"))
        return archive.extract(name, tmp_path_factory.mktemp("module"))


def test_the_kernels_of_every_architecture_are_sound(module):
    check_every_architecture(module)


def test_the_cuda_module_links_no_library_of_torch_and_no_cuda_runtime(module):
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("readelf is not installed")
    dynamic = subprocess.run([readelf, "-d", module], check=True, capture_output=True, text=True)
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic.stdout)
    assert needed
    assert not [n for n in needed if n.startswith(("libtorch", "libc10", "libcudart", "libcuda."))]
