// The kernels of one chunk, as a table of functions for each instruction set.
//
// A chunk is a run of at most kChunkElements elements of one tensor, contiguous in memory. Sizes
// are elements, complex tensors count as twice as many real ones.
#pragma once

#include <cstdint>

namespace stepclock {

// 64 KiB of fp32: some 20 microseconds of work, and a window's slots stay below a thousandth of
// the gradients. Part of the contract: sums are added chunk by chunk.
constexpr int64_t kChunkElements = 16384;

enum class DType : uint8_t { kFloat32 = 0, kFloat64 = 1, kBFloat16 = 2, kFloat16 = 3 };

struct AdamScalars {
  double lr, beta1, beta2, eps, weight_decay;
  bool decoupled, amsgrad;
};

struct SgdScalars {
  double lr, momentum, dampening, weight_decay;
  bool nesterov, first;
};

struct AdamChunk {
  void* param;
  const void* grad;
  void* exp_avg;
  void* exp_avg_sq;
  void* max_exp_avg_sq;  // null without amsgrad
  int64_t num_elements;
  double bias1;  // 1 - beta1^t, t the parameter's own step, counted from 1
  double bias2;  // 1 - beta2^t
};

struct SgdChunk {
  void* param;
  const void* grad;
  void* buffer;  // null without momentum
  int64_t num_elements;
};

struct Kernels {
  const char* name;
  // Reads num_elements once. fp64 sum of squares, exact products for every type below fp64.
  double (*sum_squares)(DType, const void* x, int64_t num_elements);
  // Reads num_elements once. Largest magnitude; NaN if any element is NaN.
  double (*max_abs)(DType, const void* x, int64_t num_elements);
  // accumulator += grad, or = grad where store is set. Returns the sum of squares of what was
  // stored, or 0 where it is not wanted.
  double (*accumulate)(DType, void* accumulator, const void* grad, int64_t num_elements, bool store,
                       bool want_sum);
  void (*scale)(DType, void* x, int64_t num_elements, double coefficient);
  // The state (moments, buffer) has the parameter's dtype, or is fp32 beside a 16-bit parameter.
  void (*adam)(DType, DType state, const AdamChunk&, const AdamScalars&, double coefficient);
  void (*sgd)(DType, DType state, const SgdChunk&, const SgdScalars&, double coefficient);
};

namespace baseline {
const Kernels& kernels();
}
#ifdef STEPCLOCK_X86
namespace avx2 {
const Kernels& kernels();
}
namespace avx512 {
const Kernels& kernels();
}
#endif

}  // namespace stepclock
