"""The Triton kernels compiled for NVIDIA GPUs, on any machine: vectors, no fusing, no spills."""

from functools import lru_cache

import pytest
from triton_compiler import KERNELS, compile_for
from triton_process import needs_triton

pytestmark = [needs_triton, pytest.mark.slow]

CAPABILITIES = [80, 90, 100]
each_capability = pytest.mark.parametrize("capability", CAPABILITIES)
# Kernels without a vector: they take a scalar of each row, or the slots, of any alignment.
SCALAR = {"steps", "fold", "coefficient"}
READ_ONLY = {"sums of fp32", "sums of bf16", "maxima of fp32"}


@lru_cache
def compiled(capability):
    return compile_for(capability)


@each_capability
def test_every_kernel_compiles_and_spills_nothing(capability):
    found = compiled(capability)
    assert set(KERNELS) < set(found)
    assert {title for title, made in found.items() if made["spilled"]} == set()


@each_capability
def test_aligned_tensors_are_read_and_written_16_bytes_at_a_time(capability):
    found = compiled(capability)
    without_loads = {title for title in KERNELS if not found[title]["loads"]}
    without_stores = {title for title in KERNELS if not found[title]["stores"]}
    assert without_loads == SCALAR
    assert without_stores == SCALAR | READ_ONLY
    assert found["AdamW fp32 unaligned"]["loads"] == found["AdamW fp32 unaligned"]["stores"] == 0


@each_capability
def test_no_arithmetic_of_an_element_is_fused(capability):
    found = compiled(capability)
    # The exponential function of beta ** t is the library's own.
    assert {title for title in KERNELS if found[title]["fused"]} == {"steps"}
    assert found["AdamW fp32 fused"]["fused"] > 0  # what the option prevents
