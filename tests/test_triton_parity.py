"""The Triton kernels under their interpreter: against the specification, and the C++ kernels."""

import pytest
from triton_process import needs_triton, run_checks

pytestmark = [needs_triton, pytest.mark.slow]

CHECKS = [
    "sums_and_maxima",
    "slots_of_other_rows",
    "accumulation",
    "values_that_are_not_finite",
    "the_coefficient",
    "scaling",
    "every_flag_of_adam",
    "every_flag_of_sgd",
    "updates_of_every_size_and_dtype",
    "masters_and_averages",
    "remainders_of_every_exponent",
    "stochastic_bits",
    "a_gate_is_shut_where_the_norm_is_not_finite",
    "nothing_beyond_a_tensor_is_read_or_written",
    "rows_of_more_than_2_to_the_31_elements",
    "two_thousand_tensors_take_three_launches_at_most",
    "addresses_are_sent_when_one_has_changed_and_checked_again",
    "states_of_another_dtype_are_taken_in_the_same_layout",
]


@pytest.fixture(scope="module")
def found():
    """What each check had to say."""
    return run_checks(CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_the_interpreted_kernels_are_right_in(found, check):
    assert found[check] is None, found[check]
