"""What a stage asks of a device: wait, time, count launches, capture. A CPU stands in for a GPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

__all__ = ["Device"]


class Device:
    """A GPU, or a CPU that goes through the same motions in a dry run.

    Args:
        name: "cuda" or "cpu".
    """

    def __init__(self, name: str) -> None:
        self.torch = torch.device(name)
        self.is_cuda = self.torch.type == "cuda"

    def synchronize(self) -> None:
        """Waits; what went wrong on the device is raised here."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def free_bytes(self) -> int:
        """Memory that can still be taken."""
        if self.is_cuda:
            return int(torch.cuda.mem_get_info()[0])
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def release(self) -> None:
        """Gives memory that no tensor holds back to the device."""
        if self.is_cuda:
            torch.cuda.empty_cache()

    def time_ms(self, run: Callable[[], object]) -> float:
        """Milliseconds from an idle device until `run` is done."""
        self.synchronize()
        if not self.is_cuda:
            start = time.perf_counter()
            run()
            return (time.perf_counter() - start) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    @contextmanager
    def forbid_waits(self) -> Iterator[None]:
        """Raises where torch makes the host wait for the device."""
        if not self.is_cuda:
            yield
            return
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def count_launches(self, run: Callable[[], object]) -> int | None:
        """Kernels that `run` starts on a GPU; None where the profiler saw none."""
        activities = {torch.profiler.ProfilerActivity.CPU}
        if self.is_cuda:
            activities.add(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as seen:
            run()
            self.synchronize()
        kernels = [
            event
            for event in seen.events() or []
            if event.device_type.name == "CUDA" and not event.name.startswith(("Memcpy", "Memset"))
        ]
        return len(kernels) or None

    def capture(self, run: Callable[[], object]) -> Callable[[], object]:
        """`run` as a CUDA graph, which is not run by capturing it: its replay."""
        self.synchronize()
        if not self.is_cuda:
            return run
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return lambda: graph.replay()
