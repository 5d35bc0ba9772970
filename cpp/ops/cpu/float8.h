// SPDX-License-Identifier: Apache-2.0
//
// The 8-bit formats of caches, without torch: e4m3, e5m2 and int8. Values and bits are those of
// torch's conversions, except that to<T>() saturates: what is too large, infinity too, becomes the
// largest finite value. It rounds once, to nearest even. NaN stays NaN; int8 has none, and gets 0.
// No branches, so that loops over them are vectorised.
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

// The bits of x in a format with a sign, kMantissaBits and, above them, exponents with the bias;
// NaN is 0x7f.
template <unsigned kBias, unsigned kMantissaBits>
[[nodiscard]] inline std::uint8_t float8_bits(float x, float largest) noexcept {
  constexpr unsigned kDropped = 23 - kMantissaBits;
  constexpr std::uint32_t kRebias = (127 - kBias) << 23;
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = bits >> 24 & 0x80U;
  const float size = std::bit_cast<float>(bits & 0x7fffffffU);
  const float magnitude = size > largest ? largest : size;
  const auto magnitude_bits = std::bit_cast<std::uint32_t>(magnitude);
  // Half a unit in the last place, a little less if that unit is even.
  const std::uint32_t half_unit = ((1U << (kDropped - 1)) - 1) + (magnitude_bits >> kDropped & 1U);
  const std::uint32_t normal = (magnitude_bits - kRebias + half_unit) >> kDropped;
  // Subnormal: adding 2^23 times their unit aligns the mantissa to it and rounds.
  constexpr float kAlign = std::bit_cast<float>((127 + 23 + 1 - kBias - kMantissaBits) << 23);
  const std::uint32_t subnormal =
      std::bit_cast<std::uint32_t>(magnitude + kAlign) - std::bit_cast<std::uint32_t>(kAlign);
  std::uint32_t result = magnitude_bits < kRebias + (1U << 23) ? subnormal : normal;
  result = x != x ? 0x7fU : result;
  return static_cast<std::uint8_t>(result | sign);
}

template <>
[[nodiscard]] inline Float8E4M3 to<Float8E4M3>(float x) noexcept {
  return {float8_bits<7, 3>(x, 448.0f)};
}

template <>
[[nodiscard]] inline Float8E5M2 to<Float8E5M2>(float x) noexcept {
  return {float8_bits<15, 2>(x, 57344.0f)};
}

template <>
[[nodiscard]] inline std::int8_t to<std::int8_t>(float x) noexcept {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float number = x != x ? 0.0f : x;
  const float low = number > 127.0f ? 127.0f : number;
  const float clamped = low < -128.0f ? -128.0f : low;
  const std::uint32_t rounded =
      std::bit_cast<std::uint32_t>(clamped + kRound) - std::bit_cast<std::uint32_t>(kRound);
  return static_cast<std::int8_t>(rounded & 0xffU);
}

}  // namespace paged_kv::cpu
