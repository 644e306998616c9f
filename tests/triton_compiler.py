"""Compiles the Triton kernels for NVIDIA GPUs, in a process of its own: neither GPU nor driver.

``python triton_compiler.py 90`` prints, for each kernel of the main path, what the compilers made
of it for sm_90.
"""

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOMS = "stepclock_ext.backends"
ADAM = dict(DECOUPLED=True, AMSGRAD=False, MAXIMIZE=False, AVERAGES=False, GATED=True)
SGD = dict(DECAY=True, MOMENTUM=True, FIRST=False, NESTEROV=False, MAXIMIZE=False, AVERAGES=False)
SUMS = dict(STORE=False, SUMS=True, GRAD_SUMS=False, PRIOR_SUMS=False)
EVERY_SUM = dict(STORE=False, SUMS=True, GRAD_SUMS=True, PRIOR_SUMS=True)
PLAIN = dict(MASTERS=False, STOCHASTIC=False)


def kinds(*dtypes):
    return dict(zip(("PARAM", "ACCUMULATOR", "STATE"), dtypes, strict=True))


def pair(grad, accumulator):
    return dict(GRAD=grad, ACCUMULATOR=accumulator)


HALF_ADAM = {**ADAM, **kinds("bfloat16", "float32", "float32")}
# Kernel, warps, and what it is compiled for; ALIGNED unless it is said otherwise.
KERNELS = {
    "sums of fp32": ("sum_squares", 8, dict(ACCUMULATOR="float32")),
    "sums of bf16": ("sum_squares", 8, dict(ACCUMULATOR="bfloat16")),
    "maxima of fp32": ("max_abs", 8, dict(ACCUMULATOR="float32")),
    "fp32 into fp32": ("accumulate", 8, {**pair("float32", "float32"), **SUMS}),
    "bf16 into fp32": ("accumulate", 16, {**pair("bfloat16", "float32"), **EVERY_SUM}),
    "scale fp32": ("scale", 8, dict(ACCUMULATOR="float32")),
    "AdamW fp32": ("adam", 8, {**ADAM, **kinds(*["float32"] * 3), **PLAIN}),
    "AdamW fp64": ("adam", 8, {**ADAM, **kinds(*["float64"] * 3), **PLAIN, "AMSGRAD": True}),
    "AdamW remainders": (
        "adam",
        16,
        {**HALF_ADAM, "MASTERS": True, "STOCHASTIC": False, "AVERAGES": True},
    ),
    "AdamW stochastic": ("adam", 16, {**HALF_ADAM, "MASTERS": False, "STOCHASTIC": True}),
    "SGD fp32": ("sgd", 8, {**SGD, **kinds(*["float32"] * 3), **PLAIN, "GATED": True}),
    "averages fp32": ("move_average", 8, dict(PARAM="float32", MASTERS=False, GATED=True)),
    "steps": ("advance_steps", 4, dict(GATED=True)),
    "fold": ("fold", 4, dict(MAXIMA=False)),
    "coefficient": ("coefficient", 4, dict(MAXIMA=False)),
}
CONTROLS = {
    "AdamW fp32 unaligned": ("adam", 8, {**KERNELS["AdamW fp32"][2], "ALIGNED": False}),
    "AdamW fp32 fused": ("adam", 8, {**KERNELS["AdamW fp32"][2], "FUSED": True}),
}


def compile_for(capability):
    """What the compilers made of each kernel, in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, __file__, str(capability)],
            env=environment | {"TRITON_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).resolve().parents[1],
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def compile_kernel(name, num_warps, constants, capability):
    """PTX of a kernel, as the backend would launch it."""
    triton = importlib.import_module("triton")
    compiler = importlib.import_module("triton.compiler")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", capability, 32)
    module = "triton_sums" if name not in UPDATES else "triton_updates"
    kernel = getattr(importlib.import_module(f"{ROOMS}.{module}"), f"{name}_kernel")
    constants = {"ALIGNED": True, **constants}
    fused = constants.pop("FUSED", False)
    named = {
        key: getattr(triton.language, value) if isinstance(value, str) else value
        for key, value in constants.items()
        if key in kernel.arg_names
    }
    signature = {arg: type_of(arg) for arg in kernel.arg_names if arg not in named}
    if "constexprs" in inspect.signature(compiler.ASTSource).parameters:
        ordered = {arg: signature.get(arg, "constexpr") for arg in kernel.arg_names}
        source = compiler.ASTSource(kernel, ordered, constexprs=named)
    else:  # triton 3.2
        source = compiler.ASTSource(kernel, signature, constants=named)
    options = {"num_warps": num_warps, "enable_fp_fusion": fused}
    return triton.compile(source, target=target, options=options).asm["ptx"]


UPDATES = ("adam", "sgd", "move_average", "advance_steps")


def type_of(argument):
    """The type of an argument as the backend passes it."""
    tables = ("chunks_ptr", "num_elements_ptr", "addresses_ptr")
    return "*i64" if argument in tables else "*fp64" if argument.endswith("_ptr") else "i64"


def count(ptx):
    """Vector accesses of 16 bytes, and fused operations."""
    vectors = r"{}\.global\S*\.(v4\.[bfu]32|v2\.[bfu]64)"
    return {
        "loads": len(re.findall(vectors.format("ld"), ptx)),
        "stores": len(re.findall(vectors.format("st"), ptx)),
        "fused": len(re.findall(r"\bfma\.", ptx)),
    }


def count_spills(ptx, capability):
    """Bytes that registers did not hold, by the assembler's report."""
    folder = Path(importlib.import_module("triton").__file__).parent / "backends/nvidia/bin"
    ptxas = folder / ("ptxas-blackwell" if capability >= 100 else "ptxas")
    ptxas = ptxas if ptxas.exists() else folder / "ptxas"
    arch = re.search(r"\.target (sm_\w+)", ptx).group(1)
    with tempfile.TemporaryDirectory() as out:
        source = Path(out) / "kernel.ptx"
        source.write_text(ptx, encoding="utf-8")
        command = [ptxas, "-v", "--fmad=false", f"--gpu-name={arch}", source, "-o", f"{out}/cubin"]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    spilled = re.findall(r"(\d+) bytes spill", report)
    assert spilled, report
    return sum(map(int, spilled))


def main(capability):
    found = {}
    for title, (name, num_warps, constants) in {**KERNELS, **CONTROLS}.items():
        ptx = compile_kernel(name, num_warps, constants, capability)
        found[title] = count(ptx) | {"spilled": count_spills(ptx, capability)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
