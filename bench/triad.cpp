// Kernels that only move memory, in the mix of streams of ours: of AdamW with fp32 parameters
// (reads four streams, writes three of them), of AdamW with bf16 ones, and of the sum of squares.
//
// The yardsticks for our kernels, compiled by the benchmark. Their threads are those of the OpenMP
// runtime that torch has loaded.
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

template <bool kRemainder, bool kAverage>
static void half_mix(uint16_t* __restrict p, uint16_t* __restrict r, float* __restrict m,
                     float* __restrict v, float* __restrict a, const float* __restrict s,
                     int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    p[i] ^= 1;
    if (kRemainder) r[i] ^= 1;
    m[i] += 1e-6f * s[i];
    v[i] += 1e-6f * (s[i] * s[i]);
    if (kAverage) a[i] += 1e-6f * s[i];
  }
}

// The mix of bf16 parameters with fp32 sums and moments: 24 bytes an element, 28 with remainders
// (null without), 36 with averages too (null without). All values stay of the kind that
// AdamW leaves, since both work on the same memory in turn.
extern "C" void triad_adam_half_mix(uint16_t** param, uint16_t** remainder, float** exp_avg,
                                    float** exp_avg_sq, float** average, const float* const* sum,
                                    int64_t num_tensors, int64_t num_elements) {
  constexpr int64_t kBlock = 16384;
  const int64_t blocks = (num_elements + kBlock - 1) / kBlock;
  const auto mix = remainder == nullptr ? half_mix<false, false>
                   : average == nullptr ? half_mix<true, false>
                                        : half_mix<true, true>;
#pragma omp parallel for schedule(dynamic, 8)
  for (int64_t work = 0; work < num_tensors * blocks; ++work) {
    const int64_t tensor = work / blocks;
    const int64_t begin = (work % blocks) * kBlock;
    const int64_t size = num_elements - begin < kBlock ? num_elements - begin : kBlock;
    mix(param[tensor] + begin, remainder == nullptr ? nullptr : remainder[tensor] + begin,
        exp_avg[tensor] + begin, exp_avg_sq[tensor] + begin,
        average == nullptr ? nullptr : average[tensor] + begin, sum[tensor] + begin, size);
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
