"""The simulator that the CUDA kernels are proved in: what it gives, and what it refuses."""

import pytest
from cuda_build import FLAGS, WRAPPER, find_compiler, run

PROGRAM = r"""
#include <cstdio>
#include "cuda_simulator.h"

void report(const char* name, int num_blocks, int num_threads, const std::function<void()>& body) {
  simulator::run(num_blocks, num_threads, body);
  const bool failed = cudaGetLastError() != cudaSuccess;
  std::printf("%s: %s\n", name, failed ? simulator::machine.error.c_str() : "fine");
}

int main() {
  auto& machine = simulator::machine;
  for (const uint64_t order : {0, 1, 5}) {
    machine.block_order = machine.thread_order = order;
    std::vector<int> visits(3 * 64);
    std::string first;
    report("visits", 3, 64, [&] {
      if (visits == std::vector<int>(3 * 64)) {
        first = std::to_string(blockIdx.x) + " " + std::to_string(threadIdx.x);
      }
      ++visits[blockIdx.x * blockDim.x + threadIdx.x];
      __syncthreads();
      if (gridDim.x != 3 || blockDim.x != 64) throw std::runtime_error("wrong sizes");
    });
    if (order < 2) std::printf("%s\n", first.c_str());
    std::printf("%d\n", visits == std::vector<int>(3 * 64, 1));
    report("shuffles", 1, 64, [&] {
      for (unsigned delta = 1; delta < 32; ++delta) {
        const double got = __shfl_down_sync(0xffffffffu, double(threadIdx.x), delta);
        const unsigned lane = threadIdx.x % 32;
        if (got != threadIdx.x + (lane + delta < 32 ? delta : 0)) throw std::runtime_error("bad");
      }
    });
  }
  machine.block_order = machine.thread_order = 0;
  unsigned long long count = 0;
  report("atomics", 2, 32, [&] { atomicAdd(&count, 2ull); });
  std::printf("%llu\n", count);
  report("early exit", 1, 64, [] { if (threadIdx.x != 3) __syncthreads(); });
  report("half of a warp", 2, 64, [] {
    if (blockIdx.x == 1 && threadIdx.x < 16) {
      __shfl_down_sync(0xffffffffu, 1, 1);
    } else {
      __syncthreads();
    }
  });
  report("distances", 1, 32, [] { __shfl_down_sync(0xffffffffu, 1, threadIdx.x < 3 ? 1 : 2); });
  report("mask", 1, 32, [] { __shfl_down_sync(0xffffu, 1, 1); });
  report("after an error", 1, 64, [] { __syncthreads(); });
  alignas(16) static char memory[64];
  machine.allowed = {{reinterpret_cast<uint64_t>(memory), reinterpret_cast<uint64_t>(memory + 32)}};
  const auto load = [](int offset, int num_bytes) {
    return [=] {
      char to[32];
      STEPCLOCK_NOTE_ACCESS(to, memory + offset, num_bytes);
      STEPCLOCK_NOTE_ACCESS(memory + offset, to, num_bytes);
    };
  };
  report("a pack", 1, 1, load(0, 32));
  report("an element", 1, 1, load(28, 4));
  std::printf("%d %d %d %d\n", int(machine.counts.load_bytes), int(machine.counts.store_bytes),
              int(machine.counts.wide_accesses), int(machine.counts.narrow_accesses));
  report("too far", 1, 1, load(16, 32));
  report("too near", 1, 1, load(-4, 4));
  report("misaligned", 1, 1, load(8, 16));
}
"""
UNREACHED = "a barrier that not every thread of block"
PLACE = "(block 0, thread 0)"
EXPECTED = [
    *("visits: fine", "0 0", "1", "shuffles: fine"),
    *("visits: fine", "2 63", "1", "shuffles: fine"),
    *("visits: fine", "1", "shuffles: fine"),
    *("atomics: fine", "128"),
    f"early exit: {UNREACHED} 0 reaches: 63 wait at __syncthreads, 0 at a shuffle, 1 have left",
    f"half of a warp: {UNREACHED} 1 reaches: 48 wait at __syncthreads, 16 at a shuffle, "
    "0 have left",
    "distances: lanes shuffle by different distances (block 0, thread 3)",
    f"mask: a shuffle of less than a warp {PLACE}",
    "after an error: fine",
    *("a pack: fine", "an element: fine", "36 36 4 2"),
    f"too far: a load outside the allowed memory {PLACE}",
    f"too near: a load outside the allowed memory {PLACE}",
    f"misaligned: a load that is misaligned {PLACE}",
]


@pytest.mark.parametrize(
    "sanitizers", [[], ["-fsanitize=address,undefined"]], ids=["plain", "asan"]
)
def test_the_simulator_keeps_the_rules_of_a_device(tmp_path, sanitizers):
    source, program = tmp_path / "program.cpp", tmp_path / "program"
    source.write_text(PROGRAM, encoding="utf-8")
    options = [*FLAGS, *sanitizers, f"-I{WRAPPER.parent}"]
    run([find_compiler(), *options, source, "-o", program])
    assert run([program]).splitlines() == EXPECTED
