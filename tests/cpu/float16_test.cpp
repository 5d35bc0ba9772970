// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/float16.h"

#include <cmath>
#include <cstdint>
#include <limits>

#include <gtest/gtest.h>

namespace paged_kv::cpu {
namespace {

// The value of a binary16 from its definition.
double half_value(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

TEST(Half, EveryFiniteValueConvertsExactlyAndBack) {
  for (std::uint32_t i = 0; i < 0x10000; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    if ((bits & 0x7c00) == 0x7c00) continue;
    const float value = to_float(Half{bits});
    EXPECT_EQ(value, half_value(bits)) << bits;
    EXPECT_EQ(to<Half>(value).bits, bits);
  }
}

TEST(Half, RoundsToNearestAndTiesToEven) {
  for (std::uint16_t bits = 0; bits < 0x7bff; ++bits) {
    const auto next = static_cast<std::uint16_t>(bits + 1);
    const auto middle = static_cast<float>((half_value(bits) + half_value(next)) / 2);  // exact
    const std::uint16_t even = bits % 2 == 0 ? bits : next;
    EXPECT_EQ(to<Half>(middle).bits, even) << bits;
    EXPECT_EQ(to<Half>(-middle).bits, even | 0x8000);
    EXPECT_EQ(to<Half>(std::nextafter(middle, 0.0f)).bits, bits);
    EXPECT_EQ(to<Half>(std::nextafter(middle, 1e30f)).bits, next);
  }
}

TEST(Half, OverflowsToInfinityAndKeepsNan) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(to<Half>(65519.996f).bits, 0x7bff);
  EXPECT_EQ(to<Half>(65520.0f).bits, 0x7c00);
  EXPECT_EQ(to<Half>(1e30f).bits, 0x7c00);
  EXPECT_EQ(to<Half>(-kInfinity).bits, 0xfc00);
  EXPECT_EQ(to_float(Half{0x7c00}), kInfinity);
  EXPECT_TRUE(std::isnan(to_float(Half{0x7c01})));
  EXPECT_TRUE(std::isnan(to_float(to<Half>(std::nanf("")))));
}

TEST(BFloat16, EveryValueSurvivesAndTiesGoToEven) {
  for (std::uint32_t i = 0; i < 0x10000; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    if ((bits & 0x7f80) == 0x7f80) continue;
    const float value = to_float(BFloat16{bits});
    EXPECT_EQ(to<BFloat16>(value).bits, bits);
    const float middle = std::bit_cast<float>((i << 16) | 0x8000U);
    EXPECT_EQ(to<BFloat16>(middle).bits, bits + (bits % 2));
    EXPECT_EQ(to<BFloat16>(std::bit_cast<float>((i << 16) | 0x8001U)).bits, bits + 1);
  }
}

TEST(BFloat16, KeepsInfinityAndNan) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(to<BFloat16>(kInfinity).bits, 0x7f80);
  EXPECT_EQ(to<BFloat16>(3.4e38f).bits, 0x7f80);
  // All mantissa bits set: adding the rounding term must not run over into the sign.
  EXPECT_TRUE(std::isnan(to_float(to<BFloat16>(std::bit_cast<float>(0x7fffffffU)))));
  EXPECT_TRUE(std::isnan(to_float(to<BFloat16>(std::bit_cast<float>(0x7f800001U)))));
}

}  // namespace
}  // namespace paged_kv::cpu
