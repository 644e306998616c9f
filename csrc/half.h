// The two 16-bit floating-point formats as bit patterns, converted without branches.
//
// Written with integer arithmetic, so that every instruction set vectorises it and gives the same
// bits; no compiler type and no F16C instruction is needed. Both directions are exact or round to
// nearest, ties to even; NaN stays NaN.
#pragma once

#include <cstdint>
#include <cstring>

#include "isa.h"

namespace stepclock {
namespace STEPCLOCK_ISA {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <typename To, typename From>
STEPCLOCK_HOST_DEVICE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

STEPCLOCK_HOST_DEVICE float to_float(BFloat16 x) {
  return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}

STEPCLOCK_HOST_DEVICE BFloat16 to_bfloat16(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const uint32_t quiet = bits | 0x00400000u;  // rounding could carry a NaN's payload into infinity
  return BFloat16{static_cast<uint16_t>((is_nan ? quiet : rounded) >> 16)};
}

// The exponent of a half sits 13 bits higher in a float and its bias is 112 smaller. Multiplying by
// 2^112 repairs the bias and, at the same time, normalises subnormal halves.
STEPCLOCK_HOST_DEVICE float to_float(Float16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
  const uint32_t scaled = bit_cast<uint32_t>(bit_cast<float>(magnitude) * 0x1p112f);
  const bool is_special = magnitude >= 0x0f800000u;  // infinity or NaN
  return bit_cast<float>(sign | (is_special ? magnitude | 0x7f800000u : scaled));
}

STEPCLOCK_HOST_DEVICE Float16 to_float16(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Normal results: move the bias, then round to even on the 13 bits that fall away. A carry into
  // the exponent is the right answer, up to and including infinity.
  const uint32_t normal = (magnitude - 0x38000000u + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  // Subnormal results (below 2^-14): adding 0.5 lets the float adder round at bit 2^-24.
  const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // 65520 and more is infinity
  half = magnitude > 0x7f800000u ? 0x7e00u : half;   // NaN
  return Float16{static_cast<uint16_t>(sign | half)};
}

}  // namespace STEPCLOCK_ISA
}  // namespace stepclock
