// Reductions of a chunk: sum of squares and largest magnitude.
//
// The sum has a fixed number of partial sums, so that every instruction set gives the same bits.
// Included by kernels.cpp alone, inside the namespace of an instruction set.
#pragma once

#include <cstdint>

#include "half.h"
#include "isa.h"

namespace stepclock {
namespace STEPCLOCK_ISA {
namespace {

// Partial sums of a chunk. 16 doubles fill two to eight registers and hide the adder's latency.
constexpr int64_t kNumLanes = 16;
// Elements that are looked at twice stay in the first-level cache: 4 KiB of floats.
constexpr int64_t kBlockElements = 1024;
// How far ahead a pass asks for memory that it only reads, 2 KiB of floats: one thread then reads
// as fast as a plain sum does, 15 ms in place of 19 for 200 MB.
constexpr int64_t kPrefetchElements = 512;
// Doubles in one register of this instruction set.
#if defined(__AVX512F__)
constexpr int64_t kWidth = 8;
#elif defined(__AVX2__)
constexpr int64_t kWidth = 4;
#else
constexpr int64_t kWidth = 2;
#endif

typedef float FloatVector __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));
typedef double DoubleVector __attribute__((vector_size(kWidth * 8), aligned(8), may_alias));

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

inline float load(const float* x, int64_t i) { return x[i]; }
inline double load(const double* x, int64_t i) { return x[i]; }
inline float load(const BFloat16* x, int64_t i) { return to_float(x[i]); }
inline float load(const Float16* x, int64_t i) { return to_float(x[i]); }
inline void store(float* x, int64_t i, float value) { x[i] = value; }
inline void store(double* x, int64_t i, double value) { x[i] = value; }
inline void store(BFloat16* x, int64_t i, float value) { x[i] = to_bfloat16(value); }
inline void store(Float16* x, int64_t i, float value) { x[i] = to_float16(value); }

inline FloatVector load_vector(const float* x) { return *reinterpret_cast<const FloatVector*>(x); }
inline DoubleVector load_vector(const double* x) {
  return *reinterpret_cast<const DoubleVector*>(x);
}
inline void store_vector(float* x, FloatVector value) {
  *reinterpret_cast<FloatVector*>(x) = value;
}
inline void store_vector(double* x, DoubleVector value) {
  *reinterpret_cast<DoubleVector*>(x) = value;
}

// The partial sums of squares of a chunk: element i goes to lane i % kNumLanes.
struct Lanes {
  static constexpr int64_t kNumRegisters = kNumLanes / kWidth;
  DoubleVector sums[kNumRegisters] = {};

  template <typename T>
  void add(const T* x, int64_t n) {
    DoubleVector registers[kNumRegisters];  // a copy, since the tail below indexes sums
    for (int64_t k = 0; k < kNumRegisters; ++k) registers[k] = sums[k];
    int64_t i = 0;
    for (; i + kNumLanes <= n; i += kNumLanes) {
      __builtin_prefetch(x + i + kPrefetchElements);
      for (int64_t k = 0; k < kNumRegisters; ++k) {
        const DoubleVector value =
            __builtin_convertvector(load_vector(x + i + k * kWidth), DoubleVector);
        registers[k] += value * value;
      }
    }
    for (int64_t k = 0; k < kNumRegisters; ++k) sums[k] = registers[k];
    for (int64_t lane = 0; i < n; ++i, ++lane) {
      const double value = x[i];
      sums[lane / kWidth][lane % kWidth] += value * value;
    }
  }

  // accumulator += grad, and the squares of the sums in the same visit: a second look at the block,
  // even in the first-level cache, costs a tenth of the pass.
  template <typename T>
  void accumulate(T* accumulator, const T* grad, int64_t n) {
    DoubleVector registers[kNumRegisters];
    for (int64_t k = 0; k < kNumRegisters; ++k) registers[k] = sums[k];
    int64_t i = 0;
    for (; i + kNumLanes <= n; i += kNumLanes) {
      for (int64_t k = 0; k < kNumRegisters; ++k) {
        const auto total =
            load_vector(accumulator + i + k * kWidth) + load_vector(grad + i + k * kWidth);
        store_vector(accumulator + i + k * kWidth, total);
        const DoubleVector value = __builtin_convertvector(total, DoubleVector);
        registers[k] += value * value;
      }
    }
    for (int64_t k = 0; k < kNumRegisters; ++k) sums[k] = registers[k];
    for (int64_t lane = 0; i < n; ++i, ++lane) {
      accumulator[i] += grad[i];
      const double value = accumulator[i];
      sums[lane / kWidth][lane % kWidth] += value * value;
    }
  }

  double total() const {
    double sum = 0.0;
    for (int64_t lane = 0; lane < kNumLanes; ++lane) sum += sums[lane / kWidth][lane % kWidth];
    return sum;
  }
};

// Adds a block of x to the lanes; 16-bit values are widened into the first-level cache first.
inline void add_block(Lanes& lanes, const float* x, int64_t n) { lanes.add(x, n); }
inline void add_block(Lanes& lanes, const double* x, int64_t n) { lanes.add(x, n); }
template <typename T>
inline void add_block(Lanes& lanes, const T* x, int64_t n) {
  float wide[kBlockElements];
  for (int64_t i = 0; i < n; ++i) wide[i] = load(x, i);
  lanes.add(wide, n);
}

template <typename T>
double sum_squares(const T* x, int64_t n) {
  Lanes lanes;
  for (int64_t begin = 0; begin < n; begin += kBlockElements) {
    add_block(lanes, x + begin, smaller(kBlockElements, n - begin));
  }
  return lanes.total();
}

// IEEE magnitudes are ordered like their bit patterns, with NaN above infinity.
template <typename Bits, typename T>
Bits max_magnitude_bits(const T* x, int64_t n) {
  constexpr Bits kMagnitude = static_cast<Bits>(~(Bits{1} << (sizeof(Bits) * 8 - 1)));
  Bits largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const Bits magnitude = static_cast<Bits>(bit_cast<Bits>(x[i]) & kMagnitude);
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

double max_abs(const float* x, int64_t n) {
  return bit_cast<float>(max_magnitude_bits<uint32_t>(x, n));
}
double max_abs(const double* x, int64_t n) {
  return bit_cast<double>(max_magnitude_bits<uint64_t>(x, n));
}
double max_abs(const BFloat16* x, int64_t n) {
  return to_float(BFloat16{max_magnitude_bits<uint16_t>(x, n)});
}
double max_abs(const Float16* x, int64_t n) {
  return to_float(Float16{max_magnitude_bits<uint16_t>(x, n)});
}

}  // namespace
}  // namespace STEPCLOCK_ISA
}  // namespace stepclock
