"""Runs checks of the Triton kernels in a process of their own, under Triton's interpreter.

Triton reads TRITON_INTERPRET when it is first imported, so that a test session cannot switch to
the interpreter. The checks are functions in triton_sum_checks.py and triton_update_checks.py; each
raises AssertionError where a kernel is wrong.
"""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fused import Rows
from tensors import BACKENDS
from tolerance import assert_bit_equal, assert_close
from torch import complex128, float64, int16

from stepclock_ext import ops

CHECKS = ["triton_sum_checks", "triton_update_checks"]
ROOMS = "stepclock_ext.backends"
REFERENCE = ops.make_backend("reference")
# A block's edges and a chunk's; the second list for what is tried in many ways.
SIZES = [0, 1, 255, 256, 257, 2048, 16383, 16384, 16385, 40_001]
EDGES = [0, 1, 257, 2049, 16385]

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def run_checks(names, replaced=None):
    """Runs checks in another process: what each had to say, None where all is well.

    Args:
        names: of the functions.
        replaced: a kernel file by the name of the module that it replaces.
    """
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    swaps = [f"{module}={path}" for module, path in (replaced or {}).items()]
    done = subprocess.run(
        [sys.executable, __file__, *names, *swaps],
        env=environment,
        cwd=Path(__file__).resolve().parents[1],
        capture_output=True,
        text=True,
    )
    found = {}
    for line in done.stdout.splitlines():
        found.update(json.loads(line))
    died = f"AssertionError: the process ended with {done.returncode}\n{done.stderr[-2000:]}"
    return {name: found.get(name, died) for name in names}


def main(arguments):
    for swap in [a for a in arguments if "=" in a]:
        module, path = swap.split("=", 1)
        spec = importlib.util.spec_from_file_location(f"{ROOMS}.{module}", path)
        sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])
    backend = importlib.import_module(f"{ROOMS}.triton").TritonBackend()
    checks = {}
    for module in CHECKS:
        checks |= vars(importlib.import_module(module))
    for name in [a for a in arguments if "=" not in a]:
        error = None
        try:
            checks[name](backend)
        except Exception:
            error = traceback.format_exc()
        print(json.dumps({name: error}), flush=True)


def copies(tensors):
    """Copies with the same strides, that begin where theirs do between two aligned places."""
    copied = []
    for t in tensors:
        first = t.storage_offset() % 16
        memory = torch.empty(first + t.numel(), dtype=t.dtype)
        copied.append(memory.as_strided(t.shape, t.stride(), first).copy_(t))
    return copied


def on(backend, rows):
    """A copy of `rows` on another backend."""
    states = list(rows.layout.state_dtypes)
    copied = {
        name: None if tensors is None else copies(tensors)
        for name, tensors in vars(rows).items()
        if name not in ("layout", "moments")
    }
    layout = replace(rows.layout, backend=backend, verified={}, cache={}, state_dtypes=states)
    return Rows(layout=layout, moments=[copies(m) for m in rows.moments], **copied)


def layouts(backend, tensors, sums):
    """Their layouts with sums of that dtype, on a backend and on the reference."""
    wide = sums if sums != tensors[0].dtype else None
    return [ops.Layout.of(b, tensors, accumulate_dtype=wide) for b in (backend, REFERENCE)]


def compare_update(backend, rows, update, *arguments, exact=False, **options):
    """An update gives the bits of the C++ kernels, and what the specification gives.

    Args:
        exact: the specification's arithmetic is the same, and so are its bits.
    """
    ours, specified = on(backend, rows), on(REFERENCE, rows)
    update(ours, *arguments, **options)
    update(specified, *arguments, **options)
    for got, want in zip(ours.written(), specified.written(), strict=True):
        if exact:
            assert_bit_equal(got, want)
        elif got.dtype != int16:
            assert_close(ops.real_view(got), ops.real_view(want), num_roundings=16)
    if "cpu" in BACKENDS:
        twin = on(ops.make_backend("cpu"), rows)
        update(twin, *arguments, **options)
        for got, want in zip(ours.written(), twin.written(), strict=True):
            if got.dtype in (float64, complex128):  # 1 - beta**t is rounded on the way there
                assert_close(ops.real_view(got), ops.real_view(want), num_roundings=16)
            else:
                assert_bit_equal(got, want)


if __name__ == "__main__":
    main(sys.argv[1:])
