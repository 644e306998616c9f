"""Where the Triton backend can be used, its reasons where it cannot, and what an import costs."""

import os
import subprocess
import sys

import pytest
import torch
from triton_process import needs_triton

PRELUDE = """
import importlib, sys
triton_backend = importlib.import_module("stepclock_ext.backends.triton")
assert "triton" not in sys.modules
"""
HAS_GPU = torch.cuda.is_available() or torch.xpu.is_available()


def run(code, **variables):
    """What a fresh process prints."""
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "error", "-c", PRELUDE + code]
    done = subprocess.run(command, env=kept | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_without_triton_the_reason_says_how_to_get_it():
    code = 'sys.modules["triton"] = None\nprint(triton_backend.status())'
    assert run(code).endswith(
        "available=False, reason='triton is not installed; pip install triton')"
    )


@needs_triton
@pytest.mark.skipif(HAS_GPU, reason="a GPU is here")
def test_without_a_gpu_the_reason_says_so_and_the_backend_is_refused():
    code = """
print(triton_backend.status().available)
try:
    triton_backend.TritonBackend()
except RuntimeError as refused:
    print(refused)
"""
    assert run(code).splitlines() == ["False", "backend 'triton': no GPU that triton can use"]


@needs_triton
def test_under_the_interpreter_it_takes_cpu_tensors():
    code = """
import torch
status, backend = triton_backend.status(), triton_backend.TritonBackend()
print(status.available, "interpreted" in status.reason, backend.name, backend.device)
dense = torch.ones(4, 3)
for tensor in (dense, dense.t(), dense.int(), dense[:, ::2], dense.to("meta")):
    print(backend.supports(tensor))
"""
    found = run(code, TRITON_INTERPRET="1").split()
    assert found == ["True", "True", "triton", "cpu", "True", "True", "False", "False", "False"]
