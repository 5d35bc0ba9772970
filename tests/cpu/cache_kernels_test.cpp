// SPDX-License-Identifier: Apache-2.0
//
// The conversions of quantised caches of each instruction set that this machine can run.
#include "ops/cpu/isa/cache_kernels.h"

#include "ops/cpu/float16.h"
#include "ops/cpu/float8.h"
#include "ops/cpu/isa/select.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace paged_kv::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int kE4M3 = 0;
constexpr int kE5M2 = 1;
constexpr int kInt8 = 2;

// The value of an 8-bit float from its definition.
double float8_value(unsigned bits, int bias, int mantissa_bits) {
  const int exponent = static_cast<int>(bits & 0x7fU) >> mantissa_bits;
  const int mantissa = static_cast<int>(bits) & ((1 << mantissa_bits) - 1);
  const int one = 1 << mantissa_bits;
  return exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                       : std::ldexp(one + mantissa, exponent - bias - mantissa_bits);
}

template <class T>
void expect_rounds_to_nearest_even(int bias, int mantissa_bits, unsigned largest) {
  for (unsigned bits = 0; bits < largest; ++bits) {
    const double value = float8_value(bits, bias, mantissa_bits);
    const auto middle =
        static_cast<float>((value + float8_value(bits + 1, bias, mantissa_bits)) / 2);
    const unsigned even = bits % 2 == 0 ? bits : bits + 1;
    EXPECT_EQ(to_float(T{static_cast<std::uint8_t>(bits)}), value);
    EXPECT_EQ(to<T>(static_cast<float>(value)).bits, bits);
    EXPECT_EQ(to<T>(middle).bits, even);
    EXPECT_EQ(to<T>(-middle).bits, even | 0x80U);
    EXPECT_EQ(to<T>(std::nextafter(middle, 0.0f)).bits, bits);
    EXPECT_EQ(to<T>(std::nextafter(middle, 1e30f)).bits, bits + 1);
  }
  for (const float x : {std::ldexp(1.0f, 17), 1e30f, kInfinity}) {
    EXPECT_EQ(to<T>(x).bits, largest);
    EXPECT_EQ(to<T>(-x).bits, largest | 0x80U);
  }
  EXPECT_EQ(to<T>(kNan).bits & 0x7fU, 0x7fU);
  EXPECT_EQ(to<T>(-0.0f).bits, 0x80U);
  EXPECT_EQ(to<T>(1e-30f).bits, 0U);
  EXPECT_EQ(to<T>(std::numeric_limits<float>::denorm_min()).bits, 0U);
}

TEST(Float8, E4M3RoundsToNearestEvenAndSaturates) {
  expect_rounds_to_nearest_even<Float8E4M3>(7, 3, 0x7e);
}

TEST(Float8, E5M2RoundsToNearestEvenAndSaturates) {
  expect_rounds_to_nearest_even<Float8E5M2>(15, 2, 0x7b);
}

TEST(Int8, RoundsToNearestEvenSaturatesAndTakesNanForZero) {
  for (int i = -128; i < 127; ++i) {
    const float middle = static_cast<float>(i) + 0.5f;
    EXPECT_EQ(to<std::int8_t>(static_cast<float>(i)), i);
    EXPECT_EQ(to<std::int8_t>(middle), i % 2 == 0 ? i : i + 1);
    EXPECT_EQ(to<std::int8_t>(std::nextafter(middle, -1e9f)), i);
    EXPECT_EQ(to<std::int8_t>(std::nextafter(middle, 1e9f)), i + 1);
  }
  EXPECT_EQ(to<std::int8_t>(127.4f), 127);
  EXPECT_EQ(to<std::int8_t>(kInfinity), 127);
  EXPECT_EQ(to<std::int8_t>(-128.6f), -128);
  EXPECT_EQ(to<std::int8_t>(-kInfinity), -128);
  EXPECT_EQ(to<std::int8_t>(kNan), 0);
}

class CacheConversions : public ::testing::TestWithParam<InstructionSet> {
 protected:
  const CacheKernels& kernels_ = *GetParam().cache;
};

INSTANTIATE_TEST_SUITE_P(InstructionSets, CacheConversions,
                         ::testing::ValuesIn(available_instruction_sets()),
                         [](const auto& test) { return std::string(test.param.attention->name); });

std::uint8_t quantised(int type, float x) {
  if (type == kE4M3) return to<Float8E4M3>(x).bits;
  if (type == kE5M2) return to<Float8E5M2>(x).bits;
  return static_cast<std::uint8_t>(to<std::int8_t>(x));
}

float dequantised(int type, std::uint8_t bits) {
  if (type == kE4M3) return to_float(Float8E4M3{bits});
  if (type == kE5M2) return to_float(Float8E5M2{bits});
  return to_float(static_cast<std::int8_t>(bits));
}

// Random bits, and values near each border of each format.
std::vector<float> floats() {
  std::vector<float> result;
  for (int type : {kE4M3, kE5M2, kInt8}) {
    for (unsigned bits = 0; bits < 256; ++bits) {
      const float x = dequantised(type, static_cast<std::uint8_t>(bits));
      for (const float factor : {0.97f, 1.0f, 1.03125f, 1.0625f, 1.125f}) {
        result.push_back(x * factor);
      }
      result.push_back(std::nextafter(x * 1.0625f, kInfinity));
    }
  }
  std::mt19937 random(7);
  for (int i = 0; i < 20000; ++i) {
    result.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random())));
  }
  return result;
}

template <class T>
void expect_quantises(const CacheKernels::ConvertRow* convert, const std::vector<T>& row) {
  const auto size = static_cast<std::int64_t>(row.size());
  for (const int type : {kE4M3, kE5M2, kInt8}) {
    for (const float scale : {1.0f, 0.37f, 1e20f}) {
      std::vector<std::uint8_t> actual(row.size());
      convert[type](row.data(), scale, size, actual.data());
      for (std::size_t i = 0; i < row.size(); ++i) {
        ASSERT_EQ(actual[i], quantised(type, to_float(row[i]) / scale)) << type << ' ' << i;
      }
    }
  }
}

TEST_P(CacheConversions, QuantiseAsTheDefinitionDoes) {
  expect_quantises(kernels_.quantize_row[0], floats());
  std::vector<Half> halves(65536);
  std::vector<BFloat16> bfloats(65536);
  for (std::uint32_t i = 0; i < 65536; ++i) {
    halves[i].bits = static_cast<std::uint16_t>(i);
    bfloats[i].bits = static_cast<std::uint16_t>(i);
  }
  expect_quantises(kernels_.quantize_row[1], halves);
  expect_quantises(kernels_.quantize_row[2], bfloats);
}

template <class T>
void expect_dequantises(const CacheKernels& kernels, int float_type) {
  std::vector<std::uint8_t> row(256);
  std::iota(row.begin(), row.end(), std::uint8_t{0});
  for (const int type : {kE4M3, kE5M2, kInt8}) {
    for (const float scale : {1.0f, 0.37f, 1e-6f}) {
      std::vector<T> actual(row.size());
      kernels.dequantize_row[type][float_type](row.data(), scale, 256, actual.data());
      for (std::size_t i = 0; i < row.size(); ++i) {
        const float expected = to_float(to<T>(dequantised(type, row[i]) * scale));
        if (std::isnan(expected)) {
          EXPECT_TRUE(std::isnan(to_float(actual[i]))) << type << ' ' << i;
        } else {
          EXPECT_EQ(to_float(actual[i]), expected) << type << ' ' << i;
        }
      }
    }
  }
}

TEST_P(CacheConversions, DequantiseAsTheDefinitionDoes) {
  expect_dequantises<float>(kernels_, 0);
  expect_dequantises<Half>(kernels_, 1);
  expect_dequantises<BFloat16>(kernels_, 2);
}

// A read or write past the end of these allocations is an error under ASan.
TEST_P(CacheConversions, TouchNothingBehindTheRows) {
  for (std::int64_t size = 0; size <= 70; ++size) {
    const std::vector<float> row(static_cast<std::size_t>(size), 3.0f);
    std::vector<std::uint8_t> bytes(static_cast<std::size_t>(size + 1), 0xa5);
    kernels_.quantize_row[0][kInt8](row.data(), 1.0f, size, bytes.data());
    std::vector<float> back(static_cast<std::size_t>(size + 1), -1.0f);
    kernels_.dequantize_row[kInt8][0](bytes.data(), 2.0f, size, back.data());
    for (std::size_t i = 0; i < row.size(); ++i) {
      EXPECT_EQ(bytes[i], 3);
      EXPECT_EQ(back[i], 6.0f);
    }
    EXPECT_EQ(bytes[row.size()], 0xa5);
    EXPECT_EQ(back[row.size()], -1.0f);
  }
}

}  // namespace
}  // namespace paged_kv::cpu
