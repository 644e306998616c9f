// CUDA's words for a CPU: blocks run one after another, and a block's threads are fibers that give
// way at barriers.
//
// The thread that comes first in the order runs as far as it can, so that a barrier that is missing
// shows in the result in one order or another. An access that is misaligned or leaves the allowed
// memory, and a barrier that not every thread reaches, make the launch fail. Accesses are counted.
#pragma once

#include <math.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <queue>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

#define __global__
#define __device__
#define __launch_bounds__(...)
#define __shared__ static  // one block is there at a time
#define STEPCLOCK_NOTE_ACCESS(to, from, num_bytes) simulator::note_access(to, from, num_bytes)

enum cudaError_t { cudaSuccess = 0, cudaErrorLaunchFailure = 719 };
using cudaStream_t = void*;

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

struct dim3 {
  unsigned x = 0;
};
inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace simulator {

constexpr int kLanes = 32;
constexpr size_t kStackBytes = 64 * 1024;

// A stack and the thread that is on it.
struct Fiber {
  ucontext_t context;  // where it begins, and
  jmp_buf place;       // where it is
  bool has_begun = false;
  std::unique_ptr<char[]> memory;
  const void* bottom = nullptr;
  size_t num_bytes = 0;
  int position = 0;  // of its thread in the order

  bool holds(const void* address) const {
    const char* begin = memory.get();
    return address >= begin && address < begin + kStackBytes;
  }
};

// A point that so many threads must reach before one of them goes on; holds their positions.
struct Barrier {
  size_t needed = 0;
  std::vector<int> waiting;
};

// What the lanes of a warp exchange: a lane is at most one shuffle ahead, so two buffers do.
struct Warp {
  Barrier barrier;
  uint64_t values[2][kLanes];
  unsigned deltas[2];
  int num_shuffles[kLanes] = {};
};

// Accesses of the elements in global memory.
struct Counts {
  int64_t load_bytes = 0, store_bytes = 0, wide_accesses = 0, narrow_accesses = 0;
};

struct Range {
  uint64_t begin, end;
};

// An order: 0 forward, 1 backward, any other number shuffled by it.
inline std::vector<unsigned> make_order(int64_t num, uint64_t seed) {
  std::vector<unsigned> order(static_cast<size_t>(num));
  std::iota(order.begin(), order.end(), 0u);
  if (seed == 1) std::reverse(order.begin(), order.end());
  if (seed > 1) std::shuffle(order.begin(), order.end(), std::mt19937_64(seed));
  return order;
}

struct Machine {
  uint64_t block_order = 0, thread_order = 0;  // of the launches to come
  std::vector<Range> allowed;                  // in order, apart; none: everything is allowed
  Counts counts;
  std::string error;  // of the last launch

  const std::function<void()>* body = nullptr;
  std::vector<unsigned> order;  // the block's threads by position
  size_t num_started = 0, num_finished = 0;
  Barrier block;
  std::vector<Warp> warps;
  std::priority_queue<int, std::vector<int>, std::greater<int>> ready;  // positions
  std::vector<Fiber*> fiber_at;                                         // by position
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Fiber*> idle;
  Fiber scheduler;  // without a stack of its own
  Fiber* current = nullptr;
};

inline Machine machine;

// swapcontext would call the system each time: it is left to a fiber's beginning.
inline void switch_fiber(Fiber& from, Fiber& to) {
  machine.current = &to;
#ifdef __SANITIZE_ADDRESS__
  void* volatile fake_stack = nullptr;
  __sanitizer_start_switch_fiber(const_cast<void**>(&fake_stack), to.bottom, to.num_bytes);
#endif
  if (_setjmp(from.place) == 0) {
    if (to.has_begun) _longjmp(to.place, 1);
    to.has_begun = true;
    setcontext(&to.context);
  }
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
}

// Threads that have not begun, one after another, while nobody has something better to do.
inline void run_threads() {
  Machine& m = machine;
  Fiber& self = *m.current;
  while (m.ready.empty() && m.num_started < m.order.size() && m.error.empty()) {
    self.position = static_cast<int>(m.num_started++);
    m.fiber_at[static_cast<size_t>(self.position)] = &self;
    threadIdx.x = m.order[static_cast<size_t>(self.position)];
    try {
      (*m.body)();
      ++m.num_finished;
    } catch (const std::runtime_error& fault) {
      m.error = fault.what() + std::string(" (block ") + std::to_string(blockIdx.x) + ", thread " +
                std::to_string(threadIdx.x) + ")";
    }
  }
}

inline void enter_fiber() {
#ifdef __SANITIZE_ADDRESS__
  Fiber& back = machine.scheduler;
  __sanitizer_finish_switch_fiber(nullptr, &back.bottom, &back.num_bytes);
#endif
  for (;;) {
    run_threads();
    machine.idle.push_back(machine.current);
    switch_fiber(*machine.current, machine.scheduler);
  }
}

inline Fiber& find_idle_fiber() {
  Machine& m = machine;
  if (m.idle.empty()) {
    m.fibers.push_back(std::make_unique<Fiber>());
    Fiber& fresh = *m.fibers.back();
    fresh.memory.reset(new char[kStackBytes]);
    fresh.bottom = fresh.memory.get();
    fresh.num_bytes = kStackBytes;
    getcontext(&fresh.context);
    fresh.context.uc_stack.ss_sp = fresh.memory.get();
    fresh.context.uc_stack.ss_size = kStackBytes;
    makecontext(&fresh.context, enter_fiber, 0);
    m.idle.push_back(&fresh);
  }
  Fiber& found = *m.idle.back();
  m.idle.pop_back();
  return found;
}

inline void wait_at(Barrier& barrier) {
  Fiber& self = *machine.current;
  barrier.waiting.push_back(self.position);
  if (barrier.waiting.size() == barrier.needed) {
    for (const int position : barrier.waiting) machine.ready.push(position);
    barrier.waiting.clear();
  }
  switch_fiber(self, machine.scheduler);
  threadIdx.x = machine.order[static_cast<size_t>(self.position)];
}

inline void report_stuck() {
  const size_t num_left = machine.num_finished, num_waiting = machine.block.waiting.size();
  machine.error = "a barrier that not every thread of block " + std::to_string(blockIdx.x) +
                  " reaches: " + std::to_string(num_waiting) + " wait at __syncthreads, " +
                  std::to_string(machine.order.size() - num_left - num_waiting) +
                  " at a shuffle, " + std::to_string(num_left) + " have left";
}

inline void run_block() {
  Machine& m = machine;
  m.num_started = m.num_finished = 0;
  m.block = Barrier{m.order.size(), {}};
  m.warps.assign((m.order.size() + kLanes - 1) / kLanes, Warp());
  for (const unsigned thread : m.order) ++m.warps[thread / kLanes].barrier.needed;
  while (m.error.empty()) {
    if (!m.ready.empty()) {
      const int position = m.ready.top();
      m.ready.pop();
      switch_fiber(m.scheduler, *m.fiber_at[static_cast<size_t>(position)]);
    } else if (m.num_started < m.order.size()) {
      switch_fiber(m.scheduler, find_idle_fiber());
    } else {
      break;
    }
  }
  if (m.error.empty() && m.num_finished < m.order.size()) report_stuck();
}

// Runs body for every thread of every block; what goes wrong is in machine.error.
inline void run(int64_t num_blocks, int num_threads, const std::function<void()>& body) {
  Machine& m = machine;
  m.error.clear();
  m.scheduler.has_begun = true;
  m.body = &body;
  m.order = make_order(num_threads, m.thread_order);
  m.fiber_at.assign(m.order.size(), nullptr);
  gridDim.x = static_cast<unsigned>(num_blocks);
  blockDim.x = static_cast<unsigned>(num_threads);
  for (const unsigned block : make_order(num_blocks, m.block_order)) {
    blockIdx.x = block;
    run_block();
    if (m.error.empty()) continue;
    m.ready = {};
    m.idle.clear();
    m.fibers.clear();  // a fault leaves some of them in the middle of their threads
    return;
  }
}

// Counts a copy between a thread's registers and global memory, and looks at where it goes.
inline void note_access(const void* to, const void* from, int num_bytes) {
  Machine& m = machine;
  const bool loads = m.current->holds(to);
  const auto begin = reinterpret_cast<uint64_t>(loads ? from : to);
  const int width = num_bytes < 16 ? num_bytes : 16;
  const uint64_t end = begin + static_cast<uint64_t>(num_bytes);
  const auto after = [](uint64_t address, const Range& range) { return address < range.begin; };
  const auto next = std::upper_bound(m.allowed.begin(), m.allowed.end(), begin, after);
  const bool inside = next != m.allowed.begin() && end <= std::prev(next)->end;
  const char* what = loads ? "a load" : "a store";
  if (!m.allowed.empty() && !inside)
    throw std::runtime_error(std::string(what) + " outside the allowed memory");
  if (begin % static_cast<uint64_t>(width) != 0)
    throw std::runtime_error(std::string(what) + " that is misaligned");
  (loads ? m.counts.load_bytes : m.counts.store_bytes) += num_bytes;
  (width == 16 ? m.counts.wide_accesses : m.counts.narrow_accesses) += num_bytes / width;
}

}  // namespace simulator

inline cudaError_t cudaGetLastError() {
  return simulator::machine.error.empty() ? cudaSuccess : cudaErrorLaunchFailure;
}

inline void __syncthreads() { simulator::wait_at(simulator::machine.block); }

inline void __threadfence() {}

inline unsigned long long atomicAdd(unsigned long long* address, unsigned long long value) {
  const unsigned long long before = *address;
  *address += value;
  return before;
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "one register or two");
  if (mask != 0xffffffffu) throw std::runtime_error("a shuffle of less than a warp");
  simulator::Warp& warp = simulator::machine.warps[threadIdx.x / simulator::kLanes];
  const unsigned lane = threadIdx.x % simulator::kLanes;
  const int buffer = warp.num_shuffles[lane]++ % 2;
  if (warp.barrier.waiting.empty()) warp.deltas[buffer] = delta;
  if (warp.deltas[buffer] != delta)
    throw std::runtime_error("lanes shuffle by different distances");
  std::memcpy(&warp.values[buffer][lane], &value, sizeof(T));
  simulator::wait_at(warp.barrier);
  const unsigned source = lane + delta < simulator::kLanes ? lane + delta : lane;
  std::memcpy(&value, &warp.values[buffer][source], sizeof(T));
  return value;
}
