// Adds micro gradients to window sums, with the sums of squares that ride along; scales sums.
//
// Bytes an element: fp32 12 (8 when it stores), bf16 into fp32 10 (6), scale 8. gpu_to_gpu: as in
// reduce.cu, a chunk is one block's; a sum that rides has the bits of one that reduce.cu reads.
#include <cstdint>

#include "launch.h"
#include "packs.h"

namespace stepclock {
namespace cuda {
namespace {

// As in reduce.cu.
constexpr int kAccumulateThreads = 512;

__device__ inline double square(float x) { return static_cast<double>(x) * x; }
__device__ inline double square(double x) { return x * x; }

// What one thread has seen of its chunk.
struct Squares {
  double sum = 0.0, grad = 0.0, prior = 0.0;
};

// A is the accumulator's type, G the gradient's: the same, or fp32 beside 16 bits.
template <typename A, typename G, int N>
__device__ inline void accumulate_pack(Squares& squares, char* accumulator, const char* grad,
                                       int64_t i, bool store) {
  using C = typename ComputeOf<G>::Type;
  const Known<A> sums(DType::kFloat32);
  const Known<G> grads(DType::kFloat32);
  C total[N], fresh[N];
  grads.load(grad, i, fresh);
  if (store) {
#pragma unroll
    for (int k = 0; k < N; ++k) total[k] = fresh[k];
  } else {
    sums.load(accumulator, i, total);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      squares.prior += square(total[k]);
      total[k] += fresh[k];
    }
  }
  A rounded[N];
#pragma unroll
  for (int k = 0; k < N; ++k) {
    narrow(rounded[k], total[k]);
    squares.sum += square(widen(rounded[k]));
    squares.grad += square(fresh[k]);
  }
  store_raw(accumulator, i, rounded);
}

__device__ inline void write_slot(double* slots, int64_t slot, double value, double* shared) {
  if (slots == nullptr) return;
  const double total = reduce_block(value, shared, Add{});
  if (threadIdx.x == 0) slots[slot] = total;
}

template <typename A, typename G>
__global__ void __launch_bounds__(kAccumulateThreads)
    accumulate_kernel(AccumulateSlots slots, TableView table, int64_t first_chunk, bool store) {
  __shared__ double shared[kAccumulateThreads / kWarpSize];
  const Span span = find_span(table, first_chunk, 1);
  char* accumulator = find_column(table, kAccumulator, span.row);
  const char* grad = find_column(table, kGrad, span.row);
  const bool aligned = is_aligned(accumulator) && is_aligned(grad);
  Squares squares;
  for_each_summed<kSumPackOf<G>>(span, aligned, [&](int64_t i, auto count) {
    accumulate_pack<A, G, decltype(count)::value>(squares, accumulator, grad, i, store);
  });
  write_slot(slots.sums, span.slot, squares.sum, shared);
  write_slot(slots.grad_sums, span.slot, squares.grad, shared);
  write_slot(slots.prior_sums, span.slot, squares.prior, shared);
}

// Elementwise ops have no sums to keep together: four blocks share a chunk, so that a tensor of a
// million elements already occupies a large card.
constexpr int kScaleThreads = 256;
constexpr int kScaleParts = 4;

template <typename T>
__global__ void __launch_bounds__(kScaleThreads)
    scale_kernel(TableView table, int64_t first_chunk, const double* stats) {
  using C = typename ComputeOf<T>::Type;
  const Span span = find_span(table, first_chunk, kScaleParts);
  char* x = find_column(table, kAccumulator, span.row);
  const C factor = static_cast<C>(stats[1]);
  const Known<T> column(DType::kFloat32);
  for_each_pack<kPackOf<T>>(span, is_aligned(x), [&](int64_t i, auto count) {
    C values[decltype(count)::value];
    column.load(x, i, values);
#pragma unroll
    for (C& value : values) value *= factor;
    column.store(x, i, values);
  });
}

template <typename A, typename G>
cudaError_t launch_accumulate(const AccumulateSlots& slots, bool store, const Section& section,
                              const Target& target) {
  return launch(accumulate_kernel<A, G>, section.num_chunks, kAccumulateThreads, target.stream,
                slots, target.table, section.first_chunk, store);
}

template <typename T>
cudaError_t launch_scale(const double* stats, const Section& section, const Target& target) {
  return launch(scale_kernel<T>, section.num_chunks * kScaleParts, kScaleThreads, target.stream,
                target.table, section.first_chunk, stats);
}

cudaError_t accumulate_section(const AccumulateSlots& slots, bool store, const Section& section,
                               const Target& target) {
  const bool wide = section.accumulator == DType::kFloat32;
  switch (section.param) {
    case DType::kFloat64:
      return launch_accumulate<double, double>(slots, store, section, target);
    case DType::kBFloat16:
      return wide ? launch_accumulate<float, BFloat16>(slots, store, section, target)
                  : launch_accumulate<BFloat16, BFloat16>(slots, store, section, target);
    case DType::kFloat16:
      return wide ? launch_accumulate<float, Float16>(slots, store, section, target)
                  : launch_accumulate<Float16, Float16>(slots, store, section, target);
    case DType::kFloat32:
      break;
  }
  return launch_accumulate<float, float>(slots, store, section, target);
}

cudaError_t scale_section(const double* stats, const Section& section, const Target& target) {
  switch (section.accumulator) {
    case DType::kFloat64:
      return launch_scale<double>(stats, section, target);
    case DType::kBFloat16:
      return launch_scale<BFloat16>(stats, section, target);
    case DType::kFloat16:
      return launch_scale<Float16>(stats, section, target);
    case DType::kFloat32:
      break;
  }
  return launch_scale<float>(stats, section, target);
}

}  // namespace

cudaError_t accumulate(const AccumulateSlots& slots, bool store, const Target& target) {
  for (int k = 0; k < target.num_sections; ++k) {
    const cudaError_t error = accumulate_section(slots, store, target.sections[k], target);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t scale(const double* stats, const Target& target) {
  for (int k = 0; k < target.num_sections; ++k) {
    const cudaError_t error = scale_section(stats, target.sections[k], target);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace cuda
}  // namespace stepclock
