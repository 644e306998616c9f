"""The outcomes of a stage, in words; others begin with "skipped: " and say why."""

__all__ = ["FAIL", "NO_GPU", "NO_TIME", "PASS"]

PASS = "pass"
FAIL = "fail"
NO_GPU = "skipped: no GPU"
NO_TIME = "skipped: no time left"
