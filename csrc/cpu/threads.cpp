// Threads: the OpenMP pool that torch already runs, or short-lived threads where there is none.
//
// A pool of our own would fight with torch's: its workers spin for a while after each parallel
// region, so on two cores ours would wait for theirs to fall asleep. torch loads its OpenMP runtime
// with global symbols, so the runtime's entry point is found by name, with nothing to link.
#include "threads.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace stepclock {
namespace {

// void GOMP_parallel(fn, data, num_threads, flags): the stable entry point of libgomp, which
// LLVM's and Intel's runtimes export as well.
using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

GompParallel find_gomp_parallel() {
  static const auto found = reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return found;
}

// Enough ranges a thread that a slow core does not hold up the others, few enough that taking one
// (an atomic add, some 20 ns) is nothing beside its work.
constexpr int64_t kRangesPerThread = 64;

struct Job {
  int64_t num_chunks;
  int64_t range;
  void (*body)(void*, int64_t, int64_t);
  void* context;
  std::atomic<int64_t> next{0};

  void work() {
    for (;;) {
      const int64_t first = next.fetch_add(range, std::memory_order_relaxed);
      if (first >= num_chunks) return;
      body(context, first, std::min(first + range, num_chunks));
    }
  }
};

void work_on(void* job) { static_cast<Job*>(job)->work(); }

}  // namespace

void run_chunks(int64_t num_chunks, int num_threads, void (*body)(void*, int64_t, int64_t),
                void* context) {
  num_threads = static_cast<int>(std::min<int64_t>(num_threads, num_chunks));
  if (num_threads <= 1) {
    if (num_chunks > 0) body(context, 0, num_chunks);
    return;
  }
  Job job{num_chunks, std::max<int64_t>(1, num_chunks / (num_threads * kRangesPerThread)), body,
          context};
  if (const GompParallel gomp_parallel = find_gomp_parallel()) {
    gomp_parallel(work_on, &job, static_cast<unsigned>(num_threads), 0);
    return;
  }
  std::vector<std::thread> helpers;
  for (int i = 1; i < num_threads; ++i) helpers.emplace_back(work_on, &job);
  job.work();
  for (std::thread& helper : helpers) helper.join();
}

const char* thread_pool_name() { return find_gomp_parallel() ? "openmp" : "std::thread"; }

}  // namespace stepclock
