// SPDX-License-Identifier: Apache-2.0
//
// Results over two sets of keys become that over both, on any threads; what is empty is not read.
#include "ops/cpu/merge_attn_states.h"

#include "ops/cpu/float16.h"
#include "random_cache.h"
#include "test_threads.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>

namespace paged_kv::cpu {
namespace {

using testing::index;
using testing::Random;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Random sides of 70 tokens and 3 heads, all memory exactly as large as it must be. Any LSE of
// `kSpecial` may meet any other.
template <class T>
class Sides {
 public:
  explicit Sides(std::uint32_t seed) : random_(seed) {
    for (Side* side : {&prefix_, &suffix_}) {
      for (std::int64_t row = 0; row < kRows; ++row) {
        side->lse.push_back(random_.one_in(3) ? random_.one_of(kSpecial) : 3.0f * random_.normal());
      }
      for (std::int64_t i = 0; i < kRows * kHeadSize; ++i) {
        const std::int64_t row = i / kHeadSize;
        const float lse = side->lse[index(row % kHeads * kTokens + row / kHeads)];
        side->output.push_back(to<T>(std::isinf(lse) ? NAN : random_.normal()));
      }
    }
  }

  void run(const ThreadRunner& runner, bool writes_lse = true) {
    std::ranges::fill(output_, to<T>(kPoison));
    std::ranges::fill(lse_, kPoison);
    constexpr std::int64_t kToken = kHeads * kHeadSize;
    merge_attn_states<T>({.output = output_.data(),
                          .output_lse = writes_lse ? lse_.data() : nullptr,
                          .prefix_output = prefix_.output.data(),
                          .prefix_lse = prefix_.lse.data(),
                          .suffix_output = suffix_.output.data(),
                          .suffix_lse = suffix_.lse.data(),
                          .output_token_stride = kToken,
                          .output_head_stride = kHeadSize,
                          .output_lse_head_stride = kTokens,
                          .output_lse_token_stride = 1,
                          .prefix_token_stride = kToken,
                          .prefix_head_stride = kHeadSize,
                          .prefix_lse_head_stride = kTokens,
                          .prefix_lse_token_stride = 1,
                          .suffix_token_stride = kToken,
                          .suffix_head_stride = kHeadSize,
                          .suffix_lse_head_stride = kTokens,
                          .suffix_lse_token_stride = 1,
                          .num_tokens = kTokens,
                          .num_heads = kHeads,
                          .head_size = kHeadSize},
                         runner);
  }

  void expect_definition() const {
    for (std::int64_t token = 0; token < kTokens; ++token) {
      for (std::int64_t head = 0; head < kHeads; ++head) expect_row(token, head);
    }
  }

  [[nodiscard]] const std::vector<float>& lse() const { return lse_; }
  [[nodiscard]] std::vector<std::byte> bytes() const {
    std::vector<std::byte> all(output_.size() * sizeof(T) + lse_.size() * sizeof(float));
    std::memcpy(all.data(), output_.data(), output_.size() * sizeof(T));
    std::memcpy(all.data() + output_.size() * sizeof(T), lse_.data(), lse_.size() * sizeof(float));
    return all;
  }

  static constexpr float kPoison = 12345.0f;

 private:
  static constexpr std::int64_t kTokens = 70, kHeads = 3, kHeadSize = 20, kRows = kTokens * kHeads;
  static constexpr std::array<float, 5> kSpecial = {-kInfinity, kInfinity, NAN, 0.0f, 88.0f};

  struct Side {
    std::vector<float> lse;  // [kHeads, kTokens]
    std::vector<T> output;   // [kTokens, kHeads, kHeadSize]
  };

  void expect_row(std::int64_t token, std::int64_t head) const {
    const std::size_t i = index(head * kTokens + token);
    const double a = prefix_.lse[i], b = suffix_.lse[i];
    const double a_sum = std::isinf(a) ? 0 : std::exp(a), b_sum = std::isinf(b) ? 0 : std::exp(b);
    const double sum = a_sum + b_sum;  // NaN if one is
    if (std::isnan(sum)) {
      ASSERT_TRUE(std::isnan(lse_[i]));
    } else if (sum == 0) {
      ASSERT_EQ(lse_[i], -kInfinity);
    } else {
      ASSERT_NEAR(lse_[i], std::log(sum), 1e-5 * (1 + std::abs(std::log(sum))));
    }
    for (std::int64_t d = 0; d < kHeadSize; ++d) {
      const std::size_t k = index((token * kHeads + head) * kHeadSize + d);
      const double actual = double{to_float(output_[k])};
      if (std::isnan(sum)) {
        ASSERT_TRUE(std::isnan(actual)) << "token " << token << " head " << head;
        continue;
      }
      double expected = 0;
      if (a_sum > 0) expected += a_sum / sum * double{to_float(prefix_.output[k])};
      if (b_sum > 0) expected += b_sum / sum * double{to_float(suffix_.output[k])};
      ASSERT_NEAR(actual, expected, kTolerance * (1 + std::abs(expected)))
          << "token " << token << " head " << head << " d " << d;
    }
  }

  static constexpr double kTolerance = std::is_same_v<T, float>  ? 1e-6
                                       : std::is_same_v<T, Half> ? 5e-4
                                                                 : 4e-3;
  Random random_;
  Side prefix_, suffix_;
  std::vector<T> output_ = std::vector<T>(index(kRows * kHeadSize));
  std::vector<float> lse_ = std::vector<float>(index(kRows));
};

template <class T>
class MergeAttnStates : public ::testing::Test {};

using FloatTypes = ::testing::Types<float, Half, BFloat16>;
TYPED_TEST_SUITE(MergeAttnStates, FloatTypes);

TYPED_TEST(MergeAttnStates, MatchesTheDefinitionWithAnyThreads) {
  for (std::uint32_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(seed);
    Sides<TypeParam> sides(seed);
    sides.run(kSerialRunner);
    sides.expect_definition();
    if (this->HasFatalFailure()) return;
    const auto serial = sides.bytes();
    for (const ThreadRunner& runner : {testing::kBackwardsRunner, testing::kFourThreadsRunner}) {
      sides.run(runner);
      ASSERT_EQ(sides.bytes(), serial);
    }
  }
}

TYPED_TEST(MergeAttnStates, MayLeaveOutTheLse) {
  Sides<TypeParam> sides(0);
  sides.run(kSerialRunner);
  auto expected = sides.bytes();
  const std::size_t num_lse_bytes = sides.lse().size() * sizeof(float);
  sides.run(kSerialRunner, /*writes_lse=*/false);
  auto actual = sides.bytes();
  expected.resize(expected.size() - num_lse_bytes);
  actual.resize(actual.size() - num_lse_bytes);
  EXPECT_EQ(actual, expected);
  EXPECT_EQ(std::ranges::count(sides.lse(), sides.kPoison), std::ssize(sides.lse()));
}

}  // namespace
}  // namespace paged_kv::cpu
