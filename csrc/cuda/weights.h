// A pack of parameters with what moves along: how it is read, rounded, stored and averaged.
#pragma once

#include <cstdint>

#include "contract.h"
#include "packs.h"
#include "rounding.h"
#include "step_math.h"

namespace stepclock {
namespace cuda {

// Where a span's parameters and their companions lie; null where a column is not used.
struct WeightColumns {
  char* param;
  char* master;
  char* average;
};

// Parameters that are all there is, rounded to nearest or stochastically.
template <typename T>
struct PlainWeights {
  using Param = T;
  using C = typename ComputeOf<T>::Type;
  static constexpr int kMasterBytes = 0;

  template <int N>
  __device__ static void load(const WeightColumns& w, int64_t i, C (&values)[N]) {
    Known<T>(DType::kFloat32).load(w.param, i, values);
  }
  // values become what was stored.
  template <int N>
  __device__ static void store(const WeightColumns& w, int64_t i, C (&values)[N]) {
    T raw[N];
#pragma unroll
    for (int k = 0; k < N; ++k) {
      narrow(raw[k], values[k]);
      values[k] = widen(raw[k]);
    }
    store_raw(w.param, i, raw);
  }
  template <int N>
  __device__ static void store_stochastically(const WeightColumns& w, int64_t i, C (&values)[N],
                                              uint32_t key, uint32_t index) {
    T raw[N];
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const uint32_t random = STEPCLOCK_ISA::random_bits(key, index + static_cast<uint32_t>(k));
      round_stochastically(raw[k], values[k], random);
      values[k] = widen(raw[k]);
    }
    store_raw(w.param, i, raw);
  }

 private:
  __device__ static void round_stochastically(BFloat16& to, float x, uint32_t random) {
    to = STEPCLOCK_ISA::to_bfloat16_stochastically(x, random);
  }
  __device__ static void round_stochastically(Float16& to, float x, uint32_t random) {
    to = STEPCLOCK_ISA::to_float16_stochastically(x, random);
  }
  __device__ static void round_stochastically(float& to, float x, uint32_t) { to = x; }
  __device__ static void round_stochastically(double& to, double x, uint32_t) { to = x; }
};

// bf16 with the 16 bits that it lacks.
struct RemainderWeights {
  using Param = BFloat16;
  using C = float;

  template <int N>
  __device__ static void load(const WeightColumns& w, int64_t i, float (&values)[N]) {
    BFloat16 half[N];
    int16_t remainder[N];
    load_raw(w.param, i, half);
    load_raw(w.master, i, remainder);
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] = STEPCLOCK_ISA::join(half[k], remainder[k]);
  }
  template <int N>
  __device__ static void store(const WeightColumns& w, int64_t i, float (&values)[N]) {
    BFloat16 half[N];
    int16_t remainder[N];
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const STEPCLOCK_ISA::SplitFloat parts = STEPCLOCK_ISA::split(values[k]);
      half[k] = parts.half;
      remainder[k] = parts.remainder;
    }
    store_raw(w.param, i, half);
    store_raw(w.master, i, remainder);
  }
  template <int N>
  __device__ static void store_stochastically(const WeightColumns& w, int64_t i, float (&values)[N],
                                              uint32_t, uint32_t) {
    store(w, i, values);
  }
};

// fp16 with an fp32 copy.
struct CopyWeights {
  using Param = Float16;
  using C = float;

  template <int N>
  __device__ static void load(const WeightColumns& w, int64_t i, float (&values)[N]) {
    Known<float>(DType::kFloat32).load(w.master, i, values);
  }
  template <int N>
  __device__ static void store(const WeightColumns& w, int64_t i, float (&values)[N]) {
    Known<float>(DType::kFloat32).store(w.master, i, values);
    Known<Float16>(DType::kFloat32).store(w.param, i, values);
  }
  template <int N>
  __device__ static void store_stochastically(const WeightColumns& w, int64_t i, float (&values)[N],
                                              uint32_t, uint32_t) {
    store(w, i, values);
  }
};

template <int N, typename C>
__device__ inline void move_average_pack(char* average, int64_t i, const C (&values)[N], C weight) {
  const Known<C> column(DType::kFloat32);
  C moved[N];
  column.load(average, i, moved);
#pragma unroll
  for (int k = 0; k < N; ++k) STEPCLOCK_ISA::average_element(moved[k], values[k], weight);
  column.store(average, i, moved);
}

}  // namespace cuda
}  // namespace stepclock
