// Ways for an fp32 value to become 16 bits, beside rounding to nearest (half.h).
//
// Exact: a bf16 and the 16 bits that it lacks. Stochastic: up or down with the probability that
// keeps the mean, from random bits that depend on a counter alone, so that neither threads nor
// instruction sets change the result.
#pragma once

#include <cstdint>

#include "half.h"
#include "isa.h"

namespace stepclock {
namespace STEPCLOCK_ISA {

struct SplitFloat {
  BFloat16 half;
  int16_t remainder;
};

// The half is the nearest bf16, ties away from zero: then the lower 16 bits, read as a signed
// number, are what separates the two, and adding them gives every bit back. Ties to even could not
// be undone. A NaN loses its payload, which rounding could carry into another number.
STEPCLOCK_HOST_DEVICE SplitFloat split(float x) {
  uint32_t bits = bit_cast<uint32_t>(x);
  bits = (bits & 0x7fffffffu) > 0x7f800000u ? (bits & 0x80000000u) | 0x7fc00000u : bits;
  return SplitFloat{BFloat16{static_cast<uint16_t>((bits + 0x8000u) >> 16)},
                    static_cast<int16_t>(bits & 0xffffu)};
}

STEPCLOCK_HOST_DEVICE float join(BFloat16 half, int16_t remainder) {
  return bit_cast<float>((static_cast<uint32_t>(half.bits) << 16) +
                         static_cast<uint32_t>(static_cast<int32_t>(remainder)));
}

// 32 random bits for an element, from the key of its chunk: a Weyl sequence through the finalizer
// of MurmurHash3 (Appleby 2011).
STEPCLOCK_HOST_DEVICE uint32_t random_bits(uint32_t key, uint32_t index) {
  uint32_t h = index * 0x9e3779b9u + key;
  h = (h ^ (h >> 16)) * 0x85ebca6bu;
  h = (h ^ (h >> 13)) * 0xc2b2ae35u;
  return h ^ (h >> 16);
}

// The key of a chunk, from the key of the update and the chunk's slot: splitmix64 (Steele et al.
// 2014).
STEPCLOCK_HOST_DEVICE uint32_t chunk_key(uint64_t update_key, int64_t slot) {
  uint64_t z = update_key + static_cast<uint64_t>(slot) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return static_cast<uint32_t>((z ^ (z >> 31)) >> 32);
}

// Adding noise below the last kept bit and cutting off carries with the right probability.
STEPCLOCK_HOST_DEVICE BFloat16 to_bfloat16_stochastically(float x, uint32_t random) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const uint32_t noisy = bits + (random >> 16);
  return BFloat16{static_cast<uint16_t>((is_nan ? bits | 0x00400000u : noisy) >> 16)};
}

STEPCLOCK_HOST_DEVICE Float16 to_float16_stochastically(float x, uint32_t random) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t noise = random >> 19;  // 13 bits fall away
  const uint32_t normal = (magnitude - 0x38000000u + noise) >> 13;
  // Below 2^-14 the result counts units of 2^-24.
  const bool is_small = magnitude < 0x38800000u;
  const float units = bit_cast<float>(is_small ? magnitude : 0u) * 0x1p24f;
  const auto subnormal =
      static_cast<uint32_t>(static_cast<int32_t>(units + static_cast<float>(noise) * 0x1p-13f));
  uint32_t half = is_small ? subnormal : normal;
  half = magnitude >= 0x47800000u ? 0x7c00u : half;  // 65536 and more is infinity
  half = magnitude > 0x7f800000u ? 0x7e00u : half;   // NaN
  return Float16{static_cast<uint16_t>(sign | half)};
}

}  // namespace STEPCLOCK_ISA
}  // namespace stepclock
