// Sums of squares, largest magnitudes, and the coefficient that follows from them.
//
// Reads 4 bytes an element (fp32) once. gpu_to_gpu: a chunk is one block's, whose threads take its
// packs in turn and are combined in a fixed tree; slots are added in an order that their number
// alone decides. Squares are taken in fp64, where no product of fp32 values overflows or
// underflows.
#include <cmath>
#include <type_traits>

#include "launch.h"
#include "packs.h"

namespace stepclock {
namespace cuda {
namespace {

// 512 threads take four packs of eight from a chunk: enough loads in flight for a block, and
// four blocks fill a multiprocessor.
constexpr int kReduceThreads = 512;
constexpr int kMaxWarps = kReduceThreads / kWarpSize;

template <typename T>
__global__ void __launch_bounds__(kReduceThreads)
    sum_squares_kernel(double* slots, TableView table, int64_t first_chunk) {
  __shared__ double shared[kMaxWarps];
  const Span span = find_span(table, first_chunk, 1);
  const char* x = find_column(table, kAccumulator, span.row);
  double sum = 0.0;
  for_each_summed<kSumPackOf<T>>(span, is_aligned(x), [&](int64_t i, auto count) {
    T values[decltype(count)::value];
    load_raw(x, i, values);
#pragma unroll
    for (const T& value : values) {
      const double wide = widen(value);
      sum += wide * wide;
    }
  });
  sum = reduce_block(sum, shared, Add{});
  if (threadIdx.x == 0) slots[span.slot] = sum;
}

template <typename T>
__global__ void __launch_bounds__(kReduceThreads)
    max_abs_kernel(double* slots, TableView table, int64_t first_chunk) {
  __shared__ double shared[kMaxWarps];
  const Span span = find_span(table, first_chunk, 1);
  const char* x = find_column(table, kAccumulator, span.row);
  double largest = 0.0;
  for_each_pack<kPackOf<T>>(span, is_aligned(x), [&](int64_t i, auto count) {
    T values[decltype(count)::value];
    load_raw(x, i, values);
#pragma unroll
    for (const T& value : values) {
      largest = Larger{}(fabs(static_cast<double>(widen(value))), largest);
    }
  });
  largest = reduce_block(largest, shared, Larger{});
  if (threadIdx.x == 0) slots[span.slot] = largest;
}

// The slots of one block: a billion parameters have 61,036, which are 60 blocks.
constexpr int64_t kSlotsPerBlock = 1024;
constexpr int64_t kMaxBlocks = 4096;

struct Scratch {
  double partials[kMaxBlocks];
  unsigned long long num_done;
};

__device__ inline double combine_slots(double a, double b, bool maxima) {
  return maxima ? Larger{}(a, b) : a + b;
}

// What thread t of a block makes of values[begin, end): those at begin + t, begin + t + 512, ...
__device__ inline double fold(const double* values, int64_t begin, int64_t end, bool maxima) {
  double total = 0.0;
  for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
    total = combine_slots(total, values[i], maxima);
  }
  return total;
}

__device__ inline double fold_block(double value, double* shared, bool maxima) {
  return maxima ? reduce_block(value, shared, Larger{}) : reduce_block(value, shared, Add{});
}

__device__ inline void write_stats(double* stats, double total, const ClipRule& rule) {
  const double norm = (rule.slots_are_maxima ? total : sqrt(total)) / rule.divisor;
  // torch's rule: min(1, max_norm / (norm + 1e-6)), where a NaN norm gives a NaN factor.
  const double ratio = isinf(rule.max_norm) ? 1.0 : rule.max_norm / (norm + 1e-6);
  const double clip = ratio >= 1.0 ? 1.0 : ratio;
  stats[0] = norm;
  stats[1] = clip / rule.divisor;
  stats[2] = clip;
}

// Each block folds its slots; the last one to finish folds what the blocks found.
__global__ void __launch_bounds__(kReduceThreads)
    coefficient_kernel(double* stats, Scratch* scratch, const double* slots, int64_t num_slots,
                       int64_t slots_per_block, ClipRule rule) {
  __shared__ double shared[kMaxWarps];
  __shared__ bool is_last;
  const bool maxima = rule.slots_are_maxima;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * slots_per_block;
  const int64_t end = begin + slots_per_block < num_slots ? begin + slots_per_block : num_slots;
  const double mine = fold_block(fold(slots, begin, end, maxima), shared, maxima);
  if (threadIdx.x == 0) {
    scratch->partials[blockIdx.x] = mine;
    __threadfence();  // the partial is seen by whoever sees the count
    is_last = atomicAdd(&scratch->num_done, 1ull) + 1 == gridDim.x;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  const double total = fold_block(fold(scratch->partials, 0, gridDim.x, maxima), shared, maxima);
  if (threadIdx.x == 0) {
    write_stats(stats, total, rule);
    scratch->num_done = 0;
  }
}

// Calls function with a null pointer of the element type that dtype names.
template <typename Function>
cudaError_t dispatch(DType dtype, Function function) {
  switch (dtype) {
    case DType::kFloat64:
      return function(static_cast<double*>(nullptr));
    case DType::kBFloat16:
      return function(static_cast<BFloat16*>(nullptr));
    case DType::kFloat16:
      return function(static_cast<Float16*>(nullptr));
    case DType::kFloat32:
      break;
  }
  return function(static_cast<float*>(nullptr));
}

}  // namespace

cudaError_t sum_squares(double* slots, const Target& target) {
  for (int k = 0; k < target.num_sections; ++k) {
    const Section& section = target.sections[k];
    const cudaError_t error = dispatch(section.accumulator, [&](auto* tag) {
      using T = std::remove_pointer_t<decltype(tag)>;
      return launch(sum_squares_kernel<T>, section.num_chunks, kReduceThreads, target.stream, slots,
                    target.table, section.first_chunk);
    });
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t max_abs(double* slots, const Target& target) {
  for (int k = 0; k < target.num_sections; ++k) {
    const Section& section = target.sections[k];
    const cudaError_t error = dispatch(section.accumulator, [&](auto* tag) {
      using T = std::remove_pointer_t<decltype(tag)>;
      return launch(max_abs_kernel<T>, section.num_chunks, kReduceThreads, target.stream, slots,
                    target.table, section.first_chunk);
    });
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

int64_t coefficient_scratch_bytes() { return static_cast<int64_t>(sizeof(Scratch)); }

cudaError_t coefficient(double* stats, void* scratch, const double* slots, int64_t num_slots,
                        const ClipRule& rule, cudaStream_t stream) {
  int64_t per_block = kSlotsPerBlock;
  while ((num_slots + per_block - 1) / per_block > kMaxBlocks) per_block *= 2;
  const int64_t num_blocks = num_slots == 0 ? 1 : (num_slots + per_block - 1) / per_block;
  return launch(coefficient_kernel, num_blocks, kReduceThreads, stream, stats,
                static_cast<Scratch*>(scratch), slots, num_slots, per_block, rule);
}

}  // namespace cuda
}  // namespace stepclock
