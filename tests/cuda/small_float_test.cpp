// SPDX-License-Identifier: Apache-2.0
//
// Conversions against the definition of rounding: every value of each format, and every midpoint
// between two of them. tests/cuda/test_conversions.py compares with torch.
#include "simt/small_float.h"

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>

#include <gtest/gtest.h>

namespace paged_kv::simt {
namespace {

struct Format {
  const char* name;
  std::uint32_t num_finite;  // non-negative finite values are the bits 0 .. num_finite - 1
  std::uint32_t sign;
  std::uint32_t overflow;  // bits of what is too large
  std::function<float(std::uint32_t)> value;
  std::function<std::uint32_t(float)> bits;
};

const Format kFormats[] = {
    {"half", 0x7c00, 0x8000, 0x7c00,
     [](std::uint32_t b) { return float_from_half(static_cast<std::uint16_t>(b)); },
     [](float x) { return std::uint32_t{half_from_float(x)}; }},
    {"bfloat16", 0x7f80, 0x8000, 0x7f80,
     [](std::uint32_t b) { return float_from_bfloat16(static_cast<std::uint16_t>(b)); },
     [](float x) { return std::uint32_t{bfloat16_from_float(x)}; }},
    {"e4m3", 0x7f, 0x80, 0x7e,
     [](std::uint32_t b) { return float_from_e4m3(static_cast<std::uint8_t>(b)); },
     [](float x) { return std::uint32_t{e4m3_from_float(x, true)}; }},
    {"e5m2", 0x7c, 0x80, 0x7b,
     [](std::uint32_t b) { return float_from_e5m2(static_cast<std::uint8_t>(b)); },
     [](float x) { return std::uint32_t{e5m2_from_float(x, true)}; }},
};

class SmallFloatFormat : public ::testing::TestWithParam<Format> {};
INSTANTIATE_TEST_SUITE_P(Each, SmallFloatFormat, ::testing::ValuesIn(kFormats),
                         [](const auto& test) { return test.param.name; });

TEST_P(SmallFloatFormat, EveryValueComesBack) {
  const Format& format = GetParam();
  for (std::uint32_t bits = 0; bits < format.num_finite; ++bits) {
    const float value = format.value(bits);
    EXPECT_EQ(format.bits(value), bits);
    EXPECT_EQ(format.bits(-value), bits | format.sign);
    if (bits > 0) {
      EXPECT_GT(value, format.value(bits - 1));
    }
  }
}

TEST_P(SmallFloatFormat, BetweenTwoValuesTheNearerAndOfMidpointsTheEven) {
  const Format& format = GetParam();
  for (std::uint32_t bits = 0; bits + 1 < format.num_finite; ++bits) {
    const double below = format.value(bits), above = format.value(bits + 1);
    const auto midpoint = static_cast<float>((below + above) / 2);
    if (double{midpoint} != (below + above) / 2) continue;  // bfloat16's least: no float between
    EXPECT_EQ(format.bits(midpoint), bits % 2 == 0 ? bits : bits + 1) << bits;
    EXPECT_EQ(format.bits(std::nextafterf(midpoint, 0.0f)), bits) << bits;
    EXPECT_EQ(format.bits(std::nextafterf(midpoint, INFINITY)), bits + 1) << bits;
  }
}

TEST_P(SmallFloatFormat, WhatIsTooLarge) {
  const Format& format = GetParam();
  const double largest = format.value(format.num_finite - 1);
  const double step = largest - format.value(format.num_finite - 2);
  const auto limit =
      static_cast<float>(largest + step / 2);  // a tie, and the largest is odd or even
  EXPECT_EQ(format.bits(std::nextafterf(limit, 0.0f)), format.num_finite - 1);
  EXPECT_EQ(format.bits(std::nextafterf(limit, INFINITY)), format.overflow);
  EXPECT_EQ(format.bits(INFINITY), format.overflow);
  EXPECT_EQ(format.bits(-INFINITY), format.overflow | format.sign);
}

TEST_P(SmallFloatFormat, NaNStaysNaN) {
  const Format& format = GetParam();
  EXPECT_TRUE(std::isnan(format.value(format.bits(NAN))));
  EXPECT_TRUE(std::isnan(format.value(format.sign - 1)));  // all bits set but the sign
}

TEST(SmallFloat, WithoutSaturation) {
  EXPECT_EQ(e4m3_from_float(465.0f, false), 0x7f);  // NaN: the format has no infinity
  EXPECT_EQ(e5m2_from_float(62000.0f, false), 0x7c);
  EXPECT_EQ(e5m2_from_float(-INFINITY, false), 0xfc);
}

}  // namespace
}  // namespace paged_kv::simt
