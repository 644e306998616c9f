// What the kernels that move parameters have in common.
//
// No sum is taken, so four blocks share a chunk. Compiled without fused multiply-add: the bits are
// those of the CPU.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "launch.h"
#include "packs.h"
#include "weights.h"

namespace stepclock {
namespace cuda {

constexpr int kUpdateThreads = 256;
// At most 64 registers a thread, so that half of a multiprocessor's threads are there.
constexpr int kBlocksPerMultiprocessor = 4;
constexpr int kUpdateParts = 4;

__device__ inline bool is_shut(const Companions& companions, const double* stats) {
  return companions.gated && !isfinite(stats[0]);
}

__device__ inline WeightColumns find_weights(const TableView& table, int64_t row,
                                             const Companions& companions) {
  return WeightColumns{find_column(table, kParam, row),
                       find_column(table, kMaster, row, companions.has_masters),
                       find_column(table, kAverage, row, companions.has_averages)};
}

// A null column is aligned.
__device__ inline bool are_aligned(const WeightColumns& w) {
  return is_aligned(w.param) && is_aligned(w.master) && is_aligned(w.average);
}

// Stores a pack of parameters, and moves their average. kExtras: there may be an average, or
// stochastic rounding.
template <typename W, bool kExtras, int N, typename C>
__device__ inline void finish_pack(const WeightColumns& w, int64_t i, C (&values)[N],
                                   const Companions& companions, uint32_t key, int64_t offset) {
  if (kExtras && companions.stochastic) {
    W::store_stochastically(w, i, values, key, static_cast<uint32_t>(offset));
  } else {
    W::store(w, i, values);
  }
  if (kExtras && w.average != nullptr) {
    move_average_pack(w.average, i, values, static_cast<C>(companions.average_weight));
  }
}

// The companions of a section: rows wider than 16 bits have no masters and round to nearest.
inline Companions narrowed(Companions companions, const Section& section) {
  companions.has_masters = companions.has_masters && is_half(section.param);
  companions.stochastic =
      companions.stochastic && is_half(section.param) && !companions.has_masters;
  return companions;
}

struct Run {
  const Section& section;
  const Target& target;
  const double* stats;
};

struct Types {
  const Section& section;
  bool has_masters, has_extras;
};

// Calls run.template with<W, A, S, kExtras>() for a section: dtypes that are the rule are known
// when the kernels are compiled, any others when they run.
template <typename W, typename Run>
cudaError_t choose_columns(const Types& types, const Run& run) {
  using T = typename W::Param;
  const DType sums = types.section.accumulator, state = types.section.state;
  if constexpr (std::is_same_v<T, double>) {
    return run.template with<W, Known<T>, Known<T>, true>();
  } else {
    const bool wide = sums == DType::kFloat32 && state == DType::kFloat32;
    if (wide && !types.has_extras) return run.template with<W, Known<float>, Known<float>, false>();
    if (wide) return run.template with<W, Known<float>, Known<float>, true>();
    return run.template with<W, Runtime, Runtime, true>();
  }
}

template <typename Run>
cudaError_t choose(const Types& types, const Run& run) {
  switch (types.section.param) {
    case DType::kFloat64:
      return choose_columns<PlainWeights<double>>(types, run);
    case DType::kBFloat16:
      return types.has_masters ? choose_columns<RemainderWeights>(types, run)
                               : choose_columns<PlainWeights<BFloat16>>(types, run);
    case DType::kFloat16:
      return types.has_masters ? choose_columns<CopyWeights>(types, run)
                               : choose_columns<PlainWeights<Float16>>(types, run);
    case DType::kFloat32:
      break;
  }
  return choose_columns<PlainWeights<float>>(types, run);
}

}  // namespace cuda
}  // namespace stepclock
