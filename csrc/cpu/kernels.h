// The kernels of one chunk, as a table of functions for each instruction set.
//
// A chunk is a run of at most kChunkElements elements of one tensor, contiguous in memory. Sizes
// are elements, complex tensors count as twice as many real ones.
#pragma once

#include <cstdint>

#include "contract.h"

namespace stepclock {

// A chunk's parameters and what moves with them.
struct Weights {
  void* param;
  DType dtype;
  void* master;   // bf16: int16 remainders; fp16: fp32 copies; else null
  void* average;  // fp32 beside 16-bit parameters, else of their dtype; null without
  double average_weight;
  bool stochastic;  // round 16-bit parameters stochastically, with key
  uint32_t key;
};

struct AccumulateChunk {
  void* accumulator;
  DType accumulator_dtype;  // the gradient's, or fp32 beside 16 bits
  const void* grad;
  DType grad_dtype;
  int64_t num_elements;
  bool store;                                       // = grad instead of += grad
  bool wants_sum, wants_grad_sum, wants_prior_sum;  // which sums of squares are asked for
};

// Sums of squares: of the accumulator after and before, and of the gradient. 0 where not asked for.
struct AccumulateSums {
  double sum, grad_sum, prior_sum;
};

struct AdamChunk {
  Weights weights;
  const void* accumulator;
  DType accumulator_dtype;
  DType state_dtype;
  void* exp_avg;
  void* exp_avg_sq;
  void* max_exp_avg_sq;  // null without amsgrad
  int64_t num_elements;
  double bias1;  // 1 - beta1^t, t the parameter's own step, counted from 1
  double bias2;  // 1 - beta2^t
};

struct SgdChunk {
  Weights weights;
  const void* accumulator;
  DType accumulator_dtype;
  DType state_dtype;
  void* buffer;  // null without momentum
  int64_t num_elements;
};

struct Kernels {
  const char* name;
  // Reads num_elements once. fp64 sum of squares, exact products for every type below fp64.
  double (*sum_squares)(DType, const void* x, int64_t num_elements);
  // Reads num_elements once. Largest magnitude; NaN if any element is NaN.
  double (*max_abs)(DType, const void* x, int64_t num_elements);
  AccumulateSums (*accumulate)(const AccumulateChunk&);
  void (*scale)(DType, void* x, int64_t num_elements, double coefficient);
  // State and accumulator have any dtype up to fp32 beside parameters up to fp32, fp64 beside fp64.
  void (*adam)(const AdamChunk&, const AdamScalars&, double coefficient);
  void (*sgd)(const SgdChunk&, const SgdScalars&, double coefficient);
  // average += average_weight * (parameter - average)
  void (*move_average)(const Weights&, int64_t num_elements);
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
