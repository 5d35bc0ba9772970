// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/cuda/division.cuh"

#include <cstdint>
#include <limits>

#include <gtest/gtest.h>

namespace paged_kv::cuda {
namespace {

TEST(Division, EqualsThatOfTheLanguageAroundEveryPowerOfTwo) {
  const auto around = [](int bit, int step) { return (std::int64_t{1} << bit) + step; };
  for (int value_bit = 1; value_bit < 63; ++value_bit) {
    for (int divisor_bit = 1; divisor_bit < 63; ++divisor_bit) {
      for (const int step : {-1, 0, 1}) {
        const std::int64_t value = around(value_bit, step);
        const std::int64_t divisor = around(divisor_bit, -step);
        const Division division = divide(value, divisor);
        EXPECT_EQ(division.quotient, value / divisor) << value << " / " << divisor;
        EXPECT_EQ(division.remainder, value % divisor) << value << " % " << divisor;
      }
    }
  }
}

TEST(Division, TakesTheLargestAndTheSmallest) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  for (const std::int64_t divisor : {std::int64_t{1}, std::int64_t{3}, kMax}) {
    EXPECT_EQ(divide(kMax, divisor).quotient, kMax / divisor);
    EXPECT_EQ(divide(kMax, divisor).remainder, kMax % divisor);
    EXPECT_EQ(divide(0, divisor).quotient, 0);
    EXPECT_EQ(divide(0, divisor).remainder, 0);
  }
}

}  // namespace
}  // namespace paged_kv::cuda
