// What every backend in C++ agrees on: chunks, dtypes, columns, and the settings of an update.
#pragma once

#include <cstdint>

namespace stepclock {

// 64 KiB of fp32: some 20 microseconds of work for a core, one block of a GPU, and a window's slots
// stay below a thousandth of the gradients. Sums are added chunk by chunk.
constexpr int64_t kChunkElements = 16384;

enum class DType : uint8_t { kFloat32 = 0, kFloat64 = 1, kBFloat16 = 2, kFloat16 = 3 };

constexpr bool is_half(DType dtype) {
  return dtype == DType::kBFloat16 || dtype == DType::kFloat16;
}

// The roles a tensor can have in an op. kGrad is one micro step's gradient, kAccumulator the
// window's sum, kBuffer SGD's momentum, kStep a parameter's own counter; kMaster holds int16
// remainders of bf16 parameters and fp32 copies of fp16 ones, kAverage the averaged weights.
enum Column : int {
  kParam,
  kGrad,
  kAccumulator,
  kExpAvg,
  kExpAvgSq,
  kMaxExpAvgSq,
  kBuffer,
  kStep,
  kMaster,
  kAverage,
  kNumColumns
};

struct AdamScalars {
  double lr, beta1, beta2, eps, weight_decay;
  bool decoupled, amsgrad;
};

struct SgdScalars {
  double lr, momentum, dampening, weight_decay;
  bool nesterov, first;
};

// What moves along with the parameters of an update: kMaster and kAverage where they are used, and
// how 16-bit parameters without masters are rounded. A gated update does nothing where the norm in
// the stats is not finite.
struct Companions {
  bool has_masters, has_averages, stochastic, gated;
  double average_weight;  // average += average_weight * (parameter - average)
  uint64_t rounding_key;  // of this update
};

}  // namespace stepclock
