// A kernel that only moves memory in the mix of AdamW: reads four streams, writes three of them.
//
// The yardstick for the update kernel, compiled by the benchmark. Its threads are those of the
// OpenMP runtime that torch has loaded.
#include <cstdint>

extern "C" void triad_adam_mix(float** param, float** exp_avg, float** exp_avg_sq,
                               const float* const* grad, int64_t num_tensors,
                               int64_t num_elements) {
  constexpr int64_t kBlock = 16384;
  const int64_t blocks = (num_elements + kBlock - 1) / kBlock;
#pragma omp parallel for schedule(dynamic, 8)
  for (int64_t work = 0; work < num_tensors * blocks; ++work) {
    const int64_t tensor = work / blocks;
    const int64_t begin = (work % blocks) * kBlock;
    const int64_t size = num_elements - begin < kBlock ? num_elements - begin : kBlock;
    float* __restrict p = param[tensor] + begin;
    float* __restrict m = exp_avg[tensor] + begin;
    float* __restrict v = exp_avg_sq[tensor] + begin;
    const float* __restrict g = grad[tensor] + begin;
    for (int64_t i = 0; i < size; ++i) {
      p[i] += 1e-6f * g[i];
      m[i] += 1e-6f * g[i];
      v[i] += 1e-6f * g[i];
    }
  }
}

// Reads one stream: the yardstick for the sum of squares.
extern "C" float triad_read(const float* const* grad, int64_t num_tensors, int64_t num_elements) {
  float total = 0.0f;
  constexpr int64_t kBlock = 16384;
  const int64_t blocks = (num_elements + kBlock - 1) / kBlock;
#pragma omp parallel for schedule(dynamic, 8) reduction(+ : total)
  for (int64_t work = 0; work < num_tensors * blocks; ++work) {
    const int64_t begin = (work % blocks) * kBlock;
    const int64_t size = num_elements - begin < kBlock ? num_elements - begin : kBlock;
    const float* __restrict g = grad[work / blocks] + begin;
    float lanes[64] = {};
    for (int64_t i = 0; i + 64 <= size; i += 64) {
      for (int64_t k = 0; k < 64; ++k) lanes[k] += g[i + k];
    }
    for (int64_t k = 0; k < 64; ++k) total += lanes[k];
  }
  return total;
}
