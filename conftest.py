"""Modules that are no place for doctests: Triton's kernels import triton, which is optional."""

import importlib.util

collect_ignore_glob = (
    [] if importlib.util.find_spec("triton") else ["stepclock_ext/backends/triton_*.py"]
)
