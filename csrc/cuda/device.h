// What the kernels need of CUDA, for its compiler and for the simulator that runs them on a CPU.
#pragma once

#ifdef STEPCLOCK_SIMULATOR
#include "cuda_simulator.h"
#else
#include <cuda_runtime.h>
#define STEPCLOCK_NOTE_ACCESS(to, from, num_bytes)  // the simulator counts and checks
#endif

#include <cstdint>

namespace stepclock {
namespace cuda {

// Runs kernel on num_blocks blocks of num_threads threads; nothing where there is no block.
template <typename... Params, typename... Args>
cudaError_t launch(void (*kernel)(Params...), int64_t num_blocks, int num_threads,
                   cudaStream_t stream, Args... args) {
  if (num_blocks == 0) return cudaSuccess;
#ifdef STEPCLOCK_SIMULATOR
  simulator::run(num_blocks, num_threads, [=] { kernel(args...); });
  static_cast<void>(stream);
#else
  kernel<<<static_cast<unsigned>(num_blocks), num_threads, 0, stream>>>(args...);
#endif
  return cudaGetLastError();
}

// The address, known to lie in global memory: the compiler cannot see that of one from a table, and
// would look at it each time.
__device__ inline char* as_global(char* address) {
#ifdef __CUDA_ARCH__
  __builtin_assume(__isGlobal(address));
#endif
  return address;
}

constexpr int kWarpSize = 32;
constexpr unsigned kFullWarp = 0xffffffffu;

// Combines the values of a block's threads, in a fixed tree: gpu_to_gpu deterministic. The result
// is thread 0's; shared holds one value a warp.
template <typename Combine>
__device__ inline double reduce_block(double value, double* shared, Combine combine) {
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value = combine(value, __shfl_down_sync(kFullWarp, value, offset));
  }
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  if (lane == 0) shared[warp] = value;
  __syncthreads();
  if (warp == 0) {
    const int num_warps = static_cast<int>(blockDim.x) / kWarpSize;
    value = lane < num_warps ? shared[lane] : 0.0;
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
      value = combine(value, __shfl_down_sync(kFullWarp, value, offset));
    }
  }
  __syncthreads();  // shared may be used again
  return value;
}

struct Add {
  __device__ double operator()(double a, double b) const { return a + b; }
};

// The larger of two magnitudes; a NaN stays.
struct Larger {
  __device__ double operator()(double a, double b) const { return a > b || a != a ? a : b; }
};

}  // namespace cuda
}  // namespace stepclock
