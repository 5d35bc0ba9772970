// SPDX-License-Identifier: Apache-2.0
//
// Exact conversions between float and the small formats of the device, written from the formats'
// definitions and independent of the CPU's own instructions.
#pragma once

#include <bit>
#include <cstdint>

namespace paged_kv::simt {

inline constexpr std::uint32_t kFloatInfBits = 0x7f800000u;

// A format with a sign bit, kExponentBits and kMantissaBits, and IEEE-754's bias and subnormals.
template <int kExponentBits, int kMantissaBits>
struct SmallFloat {
  static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  static constexpr int kMinExponent = 1 - kBias;

  // Sign-less bits of the value nearest to the finite `magnitude`, ties to even. What is too large
  // for the format runs on into exponents that it does not have: the caller compares.
  [[nodiscard]] static constexpr std::uint32_t round(std::uint32_t magnitude_bits) noexcept {
    const int exponent_field = static_cast<int>(magnitude_bits >> 23);
    const std::uint32_t significand =
        (magnitude_bits & 0x7fffffu) | (exponent_field != 0 ? 0x800000u : 0u);
    const int exponent = (exponent_field != 0 ? exponent_field : 1) - 127;
    const int subnormal_shift = exponent < kMinExponent ? kMinExponent - exponent : 0;
    const int shift = 23 - kMantissaBits + subnormal_shift;
    if (shift > 24) return 0;  // less than half of the smallest subnormal
    const std::uint32_t half = 1u << (shift - 1);
    const std::uint32_t remainder = significand & ((half << 1) - 1);
    std::uint32_t rounded = significand >> shift;
    if (remainder > half || (remainder == half && (rounded & 1u) != 0)) ++rounded;
    const int biased = exponent + subnormal_shift + kBias;
    // `rounded` holds the implicit bit (none if subnormal), which counts the exponent up by one.
    return (static_cast<std::uint32_t>(biased - 1) << kMantissaBits) + rounded;
  }

  // The value of sign-less finite bits; exact.
  [[nodiscard]] static constexpr float value(std::uint32_t bits) noexcept {
    const int exponent_field = static_cast<int>(bits >> kMantissaBits);
    const std::uint32_t mantissa = bits & ((1u << kMantissaBits) - 1);
    if (exponent_field == 0) {
      const auto unit = std::bit_cast<float>(
          static_cast<std::uint32_t>(kMinExponent - kMantissaBits + 127) << 23);
      return static_cast<float>(mantissa) * unit;
    }
    const auto float_exponent = static_cast<std::uint32_t>(exponent_field - kBias + 127);
    return std::bit_cast<float>((float_exponent << 23) | (mantissa << (23 - kMantissaBits)));
  }
};

using HalfFormat = SmallFloat<5, 10>;
using E4M3Format = SmallFloat<4, 3>;  // no infinity; 0x7f is NaN
using E5M2Format = SmallFloat<5, 2>;

// float -> half, NaN -> 0x7fff as the device's cvt.rn.f16.f32.
[[nodiscard]] constexpr std::uint16_t half_from_float(float x) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > kFloatInfBits) return 0x7fff;
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  std::uint32_t result = magnitude == kFloatInfBits ? 0x7c00u : HalfFormat::round(magnitude);
  if (result > 0x7c00u) result = 0x7c00u;
  return static_cast<std::uint16_t>(sign | result);
}

[[nodiscard]] constexpr float float_from_half(std::uint16_t bits) noexcept {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t magnitude = bits & 0x7fffu;
  const std::uint32_t result = magnitude >= 0x7c00u
                                   ? (kFloatInfBits | ((magnitude & 0x3ffu) << 13))
                                   : std::bit_cast<std::uint32_t>(HalfFormat::value(magnitude));
  return std::bit_cast<float>(sign | result);
}

// bfloat16 is the upper half of a float. NaN -> 0x7fff.
[[nodiscard]] constexpr std::uint16_t bfloat16_from_float(float x) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if ((bits & 0x7fffffffu) > kFloatInfBits) return 0x7fff;
  const std::uint32_t ties_to_even = 0x7fffu + ((bits >> 16) & 1u);
  return static_cast<std::uint16_t>((bits + ties_to_even) >> 16);
}

[[nodiscard]] constexpr float float_from_bfloat16(std::uint16_t bits) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

// `saturate`: what is too large, infinity included, becomes the largest finite value; else NaN.
[[nodiscard]] constexpr std::uint8_t e4m3_from_float(float x, bool saturate) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t sign = (bits >> 24) & 0x80u;
  if (magnitude > kFloatInfBits) return 0x7f;
  std::uint32_t result = magnitude == kFloatInfBits ? 0x7fu : E4M3Format::round(magnitude);
  if (result > 0x7eu) result = saturate ? 0x7eu : 0x7fu;
  return static_cast<std::uint8_t>(sign | result);
}

[[nodiscard]] constexpr float float_from_e4m3(std::uint8_t bits) noexcept {
  const std::uint32_t magnitude = bits & 0x7fu;
  if (magnitude == 0x7fu) return std::bit_cast<float>(0x7fffffffu);
  const float value = E4M3Format::value(magnitude);
  return (bits & 0x80u) != 0 ? -value : value;
}

// Without `saturate`, what is too large becomes infinity.
[[nodiscard]] constexpr std::uint8_t e5m2_from_float(float x, bool saturate) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t sign = (bits >> 24) & 0x80u;
  if (magnitude > kFloatInfBits) return 0x7f;
  std::uint32_t result = magnitude == kFloatInfBits ? 0x7cu : E5M2Format::round(magnitude);
  if (result > 0x7bu) result = saturate ? 0x7bu : 0x7cu;
  return static_cast<std::uint8_t>(sign | result);
}

[[nodiscard]] constexpr float float_from_e5m2(std::uint8_t bits) noexcept {
  const std::uint32_t magnitude = bits & 0x7fu;
  if (magnitude > 0x7cu) return std::bit_cast<float>(0x7fffffffu);
  const float value =
      magnitude == 0x7cu ? std::bit_cast<float>(kFloatInfBits) : E5M2Format::value(magnitude);
  return (bits & 0x80u) != 0 ? -value : value;
}

}  // namespace paged_kv::simt
