// Runs a range of chunks on several threads.
#pragma once

#include <cstdint>

namespace stepclock {

// Calls body(context, first, last) for disjoint ranges that cover [0, num_chunks). Ranges are
// handed out as threads become free; which thread takes which must not matter to the result. The
// calling thread works too. body must not throw.
void run_chunks(int64_t num_chunks, int num_threads, void (*body)(void*, int64_t, int64_t),
                void* context);

// "openmp" where torch's own worker threads are shared, else "std::thread".
const char* thread_pool_name();

template <typename Body>
void parallel_chunks(int64_t num_chunks, int num_threads, const Body& body) {
  auto call = [](void* context, int64_t first, int64_t last) {
    (*static_cast<const Body*>(context))(first, last);
  };
  run_chunks(num_chunks, num_threads, call, const_cast<Body*>(&body));
}

}  // namespace stepclock
