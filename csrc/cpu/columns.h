// A block of a column in the type that arithmetic runs in.
//
// Where the column has that type already, it is worked on where it lies. 16-bit columns are widened
// into a block that stays in the first-level cache and narrowed from there, so that one loop of
// arithmetic serves every combination of dtypes. Included by kernels.cpp alone.
#pragma once

#include <cstdint>

#include "half.h"
#include "isa.h"
#include "kernels.h"
#include "reductions.h"
#include "rounding.h"
#include "step_math.h"

namespace stepclock {
namespace STEPCLOCK_ISA {
namespace {

// Elements that an update widens at once. Measured on AVX2: blocks of 1024 cost 4 to 15 % more,
// blocks of 64 nothing less.
constexpr int64_t kUpdateElements = 128;

template <typename T>
const float* widen_into(float* block, const T* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) block[i] = load(x, i);
  return block;
}

template <typename T>
void narrow_from(const float* block, T* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) store(x, i, block[i]);
}

// Elements [begin, begin + n) of a column: the column itself, or widened into block.
inline const float* read_column(DType dtype, const void* x, int64_t begin, int64_t n,
                                float* block) {
  switch (dtype) {
    case DType::kBFloat16:
      return widen_into(block, static_cast<const BFloat16*>(x) + begin, n);
    case DType::kFloat16:
      return widen_into(block, static_cast<const Float16*>(x) + begin, n);
    default:
      return static_cast<const float*>(x) + begin;
  }
}
inline const double* read_column(DType, const void* x, int64_t begin, int64_t, double*) {
  return static_cast<const double*>(x) + begin;
}

// The same, to be written: write_column stores what was widened. Unread, the block is not filled.
template <typename C>
C* open_column(DType dtype, void* x, int64_t begin, int64_t n, C* block, bool is_read = true) {
  if (!is_read && is_half(dtype)) return block;
  return const_cast<C*>(read_column(dtype, x, begin, n, block));
}

inline void write_column(DType dtype, void* x, int64_t begin, int64_t n, const float* values) {
  if (dtype == DType::kBFloat16) narrow_from(values, static_cast<BFloat16*>(x) + begin, n);
  if (dtype == DType::kFloat16) narrow_from(values, static_cast<Float16*>(x) + begin, n);
}
inline void write_column(DType, void*, int64_t, int64_t, const double*) {}

// Parameters: exact where they have masters.
inline float* open_weights(const Weights& w, int64_t begin, int64_t n, float* block) {
  if (w.master == nullptr) return open_column(w.dtype, w.param, begin, n, block);
  if (w.dtype == DType::kFloat16) return static_cast<float*>(w.master) + begin;
  const BFloat16* half = static_cast<const BFloat16*>(w.param) + begin;
  const int16_t* remainder = static_cast<const int16_t*>(w.master) + begin;
  for (int64_t i = 0; i < n; ++i) block[i] = join(half[i], remainder[i]);
  return block;
}
inline double* open_weights(const Weights& w, int64_t begin, int64_t, double*) {
  return static_cast<double*>(w.param) + begin;
}

inline void split_weights(const Weights& w, int64_t begin, int64_t n, const float* values) {
  BFloat16* half = static_cast<BFloat16*>(w.param) + begin;
  int16_t* remainder = static_cast<int16_t*>(w.master) + begin;
  for (int64_t i = 0; i < n; ++i) {
    const SplitFloat parts = split(values[i]);
    half[i].bits = parts.half.bits;  // g++ 12 does not vectorise the assignment of the struct
    remainder[i] = parts.remainder;
  }
}

inline void round_weights(const Weights& w, int64_t begin, int64_t n, const float* values) {
  const auto first = static_cast<uint32_t>(begin);
  if (w.dtype == DType::kBFloat16) {
    BFloat16* x = static_cast<BFloat16*>(w.param) + begin;
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t random = random_bits(w.key, first + static_cast<uint32_t>(i));
      x[i] = to_bfloat16_stochastically(values[i], random);
    }
  } else {
    Float16* x = static_cast<Float16*>(w.param) + begin;
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t random = random_bits(w.key, first + static_cast<uint32_t>(i));
      x[i] = to_float16_stochastically(values[i], random);
    }
  }
}

inline void write_weights(const Weights& w, int64_t begin, int64_t n, const float* values) {
  if (w.master != nullptr && w.dtype == DType::kBFloat16) {
    split_weights(w, begin, n, values);
  } else if (w.stochastic && is_half(w.dtype)) {
    round_weights(w, begin, n, values);
  } else {
    write_column(w.dtype, w.param, begin, n, values);
  }
}
inline void write_weights(const Weights&, int64_t, int64_t, const double*) {}

template <typename C>
void average_loop(C* __restrict average, const C* __restrict values, int64_t n, C weight) {
  for (int64_t i = 0; i < n; ++i) {
    C moved = average[i];
    average_element(moved, values[i], weight);
    average[i] = moved;
  }
}

// Averages what the parameters are worth: their masters, or what was stored of them.
template <typename C>
void move_average(const Weights& w, int64_t begin, int64_t n, C* block) {
  C* average = static_cast<C*>(w.average) + begin;
  average_loop(average, static_cast<const C*>(open_weights(w, begin, n, block)), n,
               static_cast<C>(w.average_weight));
}

// How many elements are worked on at once: all of them where no column needs a block.
inline int64_t block_size(const Weights& w, DType accumulator, DType state, int64_t num_elements) {
  const bool direct = !is_half(w.dtype) && !is_half(accumulator) && !is_half(state);
  return direct && w.average == nullptr ? num_elements : kUpdateElements;
}

}  // namespace
}  // namespace STEPCLOCK_ISA
}  // namespace stepclock
