"""Faults that were put into the Triton kernels are found by the checks under the interpreter."""

from pathlib import Path

import pytest
from triton_process import needs_triton, run_checks

pytestmark = [needs_triton, pytest.mark.slow]

BACKENDS = Path(__file__).resolve().parents[1] / "stepclock_ext" / "backends"
# The kernel file, what stands there, what the fault makes of it, and the check that finds it.
FAULTS = {
    "an update takes one element too many": (
        "triton_updates",
        "mask = (offs < left) if masked else None",
        "mask = (offs <= left) if masked else None",
        "nothing_beyond_a_tensor_is_read_or_written",
    ),
    "a sum takes one element too many": (
        "triton_sums",
        "mask=full + offs < left",
        "mask=full + offs <= left",
        "nothing_beyond_a_tensor_is_read_or_written",
    ),
    "the first element of a chunk is counted in 32 bits": (
        "triton_elements",
        "tl.multiple_of(tl.load(chunk_ptr + 1), CHUNK) + offset",
        "tl.multiple_of(tl.load(chunk_ptr + 1), CHUNK).to(tl.int32) + offset",
        "rows_of_more_than_2_to_the_31_elements",
    ),
    "no gate is ever shut": (
        "triton_elements",
        'tl.abs(tl.load(stats_ptr)) < float("inf")',
        "tl.program_id(0) >= 0",
        "a_gate_is_shut_where_the_norm_is_not_finite",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_it_is_found_that(fault, tmp_path):
    module, right, wrong, check = FAULTS[fault]
    source = (BACKENDS / f"{module}.py").read_text(encoding="utf-8")
    assert right in source, f"{module}.py has changed: find the text that the fault replaces"
    path = tmp_path / f"{module}.py"
    path.write_text(source.replace(right, wrong), encoding="utf-8")
    found = run_checks([check], {module: path})[check]
    assert found is not None, "the fault was not found"
    assert "AssertionError" in found, found


def test_kernels_that_were_copied_unchanged_pass(tmp_path):
    path = tmp_path / "triton_elements.py"
    path.write_text((BACKENDS / "triton_elements.py").read_text(encoding="utf-8"), "utf-8")
    check = "rows_of_more_than_2_to_the_31_elements"
    found = run_checks([check], {"triton_elements": path})[check]
    assert found is None, found
