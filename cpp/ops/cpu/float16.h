// SPDX-License-Identifier: Apache-2.0
//
// The two 16-bit float formats, without torch: same bits as torch's conversions (round to nearest,
// ties to even; NaN stays NaN). No branches, so that loops over them are vectorised.
#pragma once

#include <bit>
#include <cstdint>

namespace paged_kv::cpu {

// IEEE 754 binary16: 1 sign, 5 exponent, 10 mantissa bits.
struct Half {
  std::uint16_t bits;
};

// The upper half of a binary32: 1 sign, 8 exponent, 7 mantissa bits.
struct BFloat16 {
  std::uint16_t bits;
};

[[nodiscard]] inline float to_float(float x) noexcept { return x; }

[[nodiscard]] inline float to_float(BFloat16 x) noexcept {
  return std::bit_cast<float>(std::uint32_t{x.bits} << 16);
}

[[nodiscard]] inline float to_float(Half x) noexcept {
  const std::uint32_t magnitude = x.bits & 0x7fffU;
  const std::uint32_t sign = (x.bits & 0x8000U) << 16;
  // Exponent bias 15 -> 127. Infinity and NaN (exponent 31) move up by 112 once more, to 255.
  const std::uint32_t rebias = magnitude >= 0x7c00U ? 224U << 23 : 112U << 23;
  const std::uint32_t normal = (magnitude << 13) + rebias;
  // Subnormal: an integer times 2^-24, exact, and a normal float.
  const float subnormal = static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f;
  const std::uint32_t value =
      magnitude < 0x0400U ? std::bit_cast<std::uint32_t>(subnormal) : normal;
  return std::bit_cast<float>(value | sign);
}

// to<T>(x): x rounded to T.
template <class T>
[[nodiscard]] T to(float x) noexcept;

template <>
[[nodiscard]] inline float to<float>(float x) noexcept {
  return x;
}

template <>
[[nodiscard]] inline BFloat16 to<BFloat16>(float x) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  // Half a unit in the last place, a little less if that unit is even.
  const std::uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  return {static_cast<std::uint16_t>(x != x ? 0x7fc0U : rounded)};
}

template <>
[[nodiscard]] inline Half to<Half>(float x) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  // Normal result: exponent bias 127 -> 15, 13 mantissa bits rounded off. A carry runs into the
  // exponent and, from the largest number, into infinity.
  const std::uint32_t normal =
      (magnitude - (112U << 23) + 0x0fffU + ((magnitude >> 13) & 1U)) >> 13;
  // Subnormal result: adding 0.5 aligns the mantissa to 2^-24 and rounds it.
  const std::uint32_t subnormal =
      std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) -
      std::bit_cast<std::uint32_t>(0.5f);
  std::uint32_t result = magnitude < (113U << 23) ? subnormal : normal;
  result = magnitude >= (143U << 23) ? 0x7c00U : result;  // from 2^16 on, and infinity
  result = magnitude > 0x7f800000U ? 0x7e00U : result;    // NaN
  return {static_cast<std::uint16_t>(result | sign)};
}

}  // namespace paged_kv::cpu
