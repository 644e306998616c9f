// Elements in registers: 16 bytes at a time where a span is aligned, one element at a time
// elsewhere.
#pragma once

#include <cstdint>
#include <cstring>

#include "contract.h"
#include "device.h"
#include "half.h"
#include "rounding.h"
#include "table.h"

namespace stepclock {
namespace cuda {

using STEPCLOCK_ISA::BFloat16;
using STEPCLOCK_ISA::Float16;

// Bytes of one vector access.
constexpr int kVectorBytes = 16;

template <typename T>
struct ComputeOf {
  using Type = float;
};
template <>
struct ComputeOf<double> {
  using Type = double;
};

// Elements of T in one vector access: what a thread works on at once.
template <typename T>
constexpr int kPackOf = kVectorBytes / static_cast<int>(sizeof(T));

__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }
__device__ inline float widen(BFloat16 x) { return STEPCLOCK_ISA::to_float(x); }
__device__ inline float widen(Float16 x) { return STEPCLOCK_ISA::to_float(x); }
__device__ inline void narrow(float& to, float x) { to = x; }
__device__ inline void narrow(double& to, double x) { to = x; }
__device__ inline void narrow(BFloat16& to, float x) { to = STEPCLOCK_ISA::to_bfloat16(x); }
__device__ inline void narrow(Float16& to, float x) { to = STEPCLOCK_ISA::to_float16(x); }

// kBytes from one place to the other, in accesses as wide as they allow.
template <int kBytes>
__device__ inline void copy_bytes(void* to, const void* from) {
  STEPCLOCK_NOTE_ACCESS(to, from, kBytes);
  if constexpr (kBytes % 16 == 0) {
#pragma unroll
    for (int k = 0; k < kBytes / 16; ++k) {
      static_cast<uint4*>(to)[k] = static_cast<const uint4*>(from)[k];
    }
  } else if constexpr (kBytes == 8) {
    *static_cast<uint2*>(to) = *static_cast<const uint2*>(from);
  } else if constexpr (kBytes == 4) {
    *static_cast<uint32_t*>(to) = *static_cast<const uint32_t*>(from);
  } else {
    static_assert(kBytes == 2, "an element or a pack of them");
    *static_cast<uint16_t*>(to) = *static_cast<const uint16_t*>(from);
  }
}

// The elements [i, i + N) of x, as they are.
template <int N, typename T>
__device__ inline void load_raw(const char* x, int64_t i, T (&values)[N]) {
  alignas(16) T raw[N];
  copy_bytes<N* static_cast<int>(sizeof(T))>(raw, x + i * static_cast<int64_t>(sizeof(T)));
#pragma unroll
  for (int k = 0; k < N; ++k) values[k] = raw[k];
}

template <int N, typename T>
__device__ inline void store_raw(char* x, int64_t i, const T (&values)[N]) {
  alignas(16) T raw[N];
#pragma unroll
  for (int k = 0; k < N; ++k) raw[k] = values[k];
  copy_bytes<N* static_cast<int>(sizeof(T))>(x + i * static_cast<int64_t>(sizeof(T)), raw);
}

// The dtype of a column: known when the kernel is compiled, or (Runtime) when it runs.
template <typename T>
struct Known {
  __device__ explicit Known(DType) {}
  template <int N, typename C>
  __device__ void load(const char* x, int64_t i, C (&values)[N]) const {
    T raw[N];
    load_raw(x, i, raw);
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] = widen(raw[k]);
  }
  template <int N, typename C>
  __device__ void store(char* x, int64_t i, const C (&values)[N]) const {
    T raw[N];
#pragma unroll
    for (int k = 0; k < N; ++k) narrow(raw[k], values[k]);
    store_raw(x, i, raw);
  }
  __device__ int64_t bytes() const { return static_cast<int64_t>(sizeof(T)); }
};

struct Runtime {
  DType dtype;
  __device__ explicit Runtime(DType given) : dtype(given) {}
  template <int N>
  __device__ void load(const char* x, int64_t i, float (&values)[N]) const {
    if (dtype == DType::kFloat32) return Known<float>(dtype).load(x, i, values);
    if (dtype == DType::kBFloat16) return Known<BFloat16>(dtype).load(x, i, values);
    Known<Float16>(dtype).load(x, i, values);
  }
  template <int N>
  __device__ void store(char* x, int64_t i, const float (&values)[N]) const {
    if (dtype == DType::kFloat32) return Known<float>(dtype).store(x, i, values);
    if (dtype == DType::kBFloat16) return Known<BFloat16>(dtype).store(x, i, values);
    Known<Float16>(dtype).store(x, i, values);
  }
  __device__ int64_t bytes() const { return dtype == DType::kFloat32 ? 4 : 2; }
};

template <int N>
struct Count {
  static constexpr int value = N;
};

// Calls body(first element, Count<N>): for packs of kPack where the span is aligned, and for single
// elements in the rest of it.
template <int kPack, typename Body>
__device__ inline void for_each_pack(const Span& span, bool aligned, Body body) {
  const int64_t num_packs = aligned ? span.num_elements / kPack : 0;
  for (int64_t i = threadIdx.x; i < num_packs; i += blockDim.x) {
    body(span.begin + i * kPack, Count<kPack>{});
  }
  for (int64_t i = num_packs * kPack + threadIdx.x; i < span.num_elements; i += blockDim.x) {
    body(span.begin + i, Count<1>{});
  }
}

// Elements that a thread of a sum takes at a time: as many of fp32 as of 16 bits, since either may
// stand beside the other.
template <typename T>
constexpr int kSumPackOf = sizeof(T) == sizeof(double) ? 2 : 8;

// As for_each_pack, for sums: where a span is not aligned its threads take the same elements in the
// same order, one at a time, so that a sum has the same bits wherever its elements lie.
template <int kPack, typename Body>
__device__ inline void for_each_summed(const Span& span, bool aligned, Body body) {
  const int64_t num_packs = span.num_elements / kPack;
  for (int64_t i = threadIdx.x; i < num_packs; i += blockDim.x) {
    const int64_t first = span.begin + i * kPack;
    if (aligned) {
      body(first, Count<kPack>{});
    } else {
#pragma unroll 1
      for (int k = 0; k < kPack; ++k) body(first + k, Count<1>{});
    }
  }
  for (int64_t i = num_packs * kPack + threadIdx.x; i < span.num_elements; i += blockDim.x) {
    body(span.begin + i, Count<1>{});
  }
}

// Whether packs that begin where a part begins are aligned in a column: parts are whole packs, so
// its first element decides.
__device__ inline bool is_aligned(const char* column) {
  return reinterpret_cast<uint64_t>(column) % kVectorBytes == 0;
}

}  // namespace cuda
}  // namespace stepclock
