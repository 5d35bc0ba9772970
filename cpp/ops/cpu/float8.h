// SPDX-License-Identifier: Apache-2.0
//
// The two 8-bit float formats of caches, without torch: the values of torch's conversions.
#pragma once

#include "ops/cpu/float16.h"

#include <bit>
#include <cstdint>

namespace paged_kv::cpu {

// 1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinity, NaN is 0x7f and 0xff; up to 448.
struct Float8E4M3 {
  std::uint8_t bits;
};

// The upper half of a binary16: 1 sign, 5 exponent, 2 mantissa bits.
struct Float8E5M2 {
  std::uint8_t bits;
};

[[nodiscard]] inline float to_float(Float8E5M2 x) noexcept {
  return to_float(Half{static_cast<std::uint16_t>(x.bits << 8)});
}

[[nodiscard]] inline float to_float(Float8E4M3 x) noexcept {
  const unsigned magnitude = x.bits & 0x7fU;
  const unsigned sign = x.bits & 0x80U;
  // As a binary16 with the same exponent field, 2^-8 times the value: the biases are 7 and 15.
  const auto half = static_cast<std::uint16_t>((sign << 8) | (magnitude << 7));
  return magnitude == 0x7fU ? std::bit_cast<float>(0x7fc00000U | (sign << 24))
                            : to_float(Half{half}) * 256.0f;
}

[[nodiscard]] inline float to_float(std::int8_t x) noexcept { return static_cast<float>(x); }

}  // namespace paged_kv::cpu
