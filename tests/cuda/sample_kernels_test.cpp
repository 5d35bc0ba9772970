// SPDX-License-Identifier: Apache-2.0
#include "sample_kernels.cuh"

#include "test_support.h"

#include <cmath>
#include <cstring>
#include <vector>

#include <gtest/gtest.h>

namespace paged_kv::cuda::testing {
namespace {

template <class T>
std::vector<T> wave(int num_elements) {
  std::vector<T> values;
  for (int i = 0; i < num_elements; ++i) {
    values.push_back(from_float<T>(3.0f * std::sin(0.7f * static_cast<float>(i))));
  }
  return values;
}

template <class T>
std::vector<T> row_softmax(const std::vector<T>& in, int num_rows, int row_len) {
  std::vector<T> out(in.size());
  launch(&row_softmax_kernel<T>, static_cast<unsigned>(num_rows), 96,
         static_cast<std::size_t>(row_len) * sizeof(float), nullptr, in.data(), out.data(),
         row_len);
  return out;
}

template <class T>
class RowSoftmax : public ::testing::Test {};
using Elements = ::testing::Types<float, Half, BFloat16>;
TYPED_TEST_SUITE(RowSoftmax, Elements);

TYPED_TEST(RowSoftmax, MatchesTheDefinition) {
  constexpr int kNumRows = 3, kRowLen = 133;
  const auto in = wave<TypeParam>(kNumRows * kRowLen);
  const auto out = row_softmax(in, kNumRows, kRowLen);
  const double tolerance = std::is_same_v<TypeParam, float>  ? 1e-8
                           : std::is_same_v<TypeParam, Half> ? 2e-5
                                                             : 2e-4;
  for (int row = 0; row < kNumRows; ++row) {
    const auto at = [&](const std::vector<TypeParam>& values, int i) {
      return double{to_float(values[static_cast<std::size_t>(row * kRowLen + i)])};
    };
    double sum = 0;
    for (int i = 0; i < kRowLen; ++i) sum += std::exp(at(in, i));
    for (int i = 0; i < kRowLen; ++i) {
      EXPECT_NEAR(at(out, i), std::exp(at(in, i)) / sum, tolerance) << row << ' ' << i;
    }
  }
}

TYPED_TEST(RowSoftmax, IsTheSameInEveryOrder) {
  constexpr int kRowLen = 70;
  const auto in = wave<TypeParam>(2 * kRowLen);
  const auto results = results_by_schedule([&] { return row_softmax(in, 2, kRowLen); });
  for (const auto& out : results) {
    EXPECT_EQ(std::memcmp(out.data(), results[0].data(), out.size() * sizeof(TypeParam)), 0);
  }
}

TEST(Quantise, RoundsSaturatesAndKeepsNaN) {
  std::vector<Half> in = wave<Half>(16);
  in[3] = from_float<Half>(60000.0f);
  in[4] = from_float<Half>(-INFINITY);
  in[5] = from_float<Half>(NAN);
  std::vector<Float8E4M3> out(in.size());
  launch(&quantise_kernel<Half, Float8E4M3>, 1, 32, 0, nullptr, in.data(), out.data(),
         std::int64_t{2}, 0.5f);
  EXPECT_EQ(to_float(out[3]), 448.0f);
  EXPECT_EQ(to_float(out[4]), -448.0f);
  EXPECT_TRUE(std::isnan(to_float(out[5])));
  for (std::size_t i = 6; i < in.size(); ++i) {
    const float expected = to_float(in[i]) / 0.5f;
    EXPECT_NEAR(to_float(out[i]), expected, std::fabs(expected) / 16 + 1e-3f);
  }
}

}  // namespace
}  // namespace paged_kv::cuda::testing
