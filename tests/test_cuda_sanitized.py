"""The CUDA kernels in the simulator under the address and undefined-behaviour sanitizers."""

import subprocess

import pytest
from cuda_build import SOURCES, WRAPPER, change, compile_sources, find_compiler, run

pytestmark = pytest.mark.slow

SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
DRIVER = WRAPPER.with_name("sanitized.cpp")


def link(objects, output):
    run([find_compiler(), "-pthread", *SANITIZERS, *objects, "-o", output])
    return output


def execute(program):
    done = subprocess.run(
        [program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
    )
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """Of the kernels and of the program that runs them."""
    probe = tmp_path_factory.mktemp("probe")
    (probe / "empty.cpp").write_text("int main() { return 0; }\n", encoding="utf-8")
    command = [find_compiler(), *SANITIZERS, probe / "empty.cpp", "-o", probe / "empty"]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("g++ has no sanitizers here")
    folder = tmp_path_factory.mktemp("sanitized")
    return compile_sources([*reversed(SOURCES), DRIVER], folder, "-O1", "-g1", *SANITIZERS)


def test_the_sanitizers_find_nothing(objects, tmp_path):
    code, output = execute(link(objects, tmp_path / "sanitized"))
    assert code == 0, output
    assert output == "720 ops ran\n"


def test_the_sanitizers_see_a_pack_too_many(objects, tmp_path):
    old = "? span.num_elements / kPack"
    csrc = change(tmp_path, "packs.h", old, f"{old} + 1")
    source = csrc / "cuda" / "accumulate.cu"
    (changed,) = compile_sources([source], tmp_path, "-O1", "-w", *SANITIZERS, csrc=csrc)
    kept = [path for path in objects if path.stem != "accumulate"]
    code, output = execute(link([changed, *kept], tmp_path / "broken"))
    assert code != 0
    assert "AddressSanitizer: heap-buffer-overflow" in output
