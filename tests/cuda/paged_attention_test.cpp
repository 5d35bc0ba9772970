// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/cuda/paged_attention.h"

#include "paged_attention_problem.h"
#include "test_support.h"

#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace paged_kv::cuda::testing {
namespace {

template <class>
class PagedAttention : public ::testing::Test {};
TYPED_TEST_SUITE(PagedAttention, AllElements);

template <class T>
constexpr double kTolerance = std::is_same_v<T, float>  ? 1e-5
                              : std::is_same_v<T, Half> ? 1.5e-3
                                                        : 1.2e-2;

// Small, because a thread of TSan's costs a millisecond.
ProblemSizes one_partition() {
  if (kUnderTsan) return {.seq_lens = {37}};
  return {.seq_lens = {37, 0, 1, 128}, .num_heads = 4, .num_kv_heads = 2, .head_size = 80};
}
ProblemSizes two_partitions() {
  if (kUnderTsan) return {.seq_lens = {530}, .num_heads = 1, .block_size = 32};
  return {.seq_lens = {530, 0, 512}, .block_size = 32};
}

// The result, which is the same bits under every schedule. TSan sees a race in any of them.
template <class F>
auto same_under_all_schedules(F run) {
  if (kUnderTsan) return run();
  const auto results = results_by_schedule(run);
  for (const auto& result : results) {
    EXPECT_EQ(std::memcmp(result.data(), results[0].data(), result.size() * sizeof result[0]), 0);
  }
  return results[0];
}

TYPED_TEST(PagedAttention, V1EqualsTheDefinition) {
  using T = typename TypeParam::T;
  AttentionProblem<T, typename TypeParam::CacheT> problem(one_partition());
  const auto out = same_under_all_schedules([&] { return problem.run_v1(); });
  EXPECT_LT(problem.error_of(out), kTolerance<T>);
}

TYPED_TEST(PagedAttention, V2EqualsTheDefinition) {
  using T = typename TypeParam::T;
  AttentionProblem<T, typename TypeParam::CacheT> problem(two_partitions());
  const auto out = same_under_all_schedules([&] { return problem.run_v2(); });
  EXPECT_LT(problem.error_of(out), kTolerance<T>);
}

using FloatProblem = AttentionProblem<float, float>;

// Under ASan any access outside the tensors is an error.
TEST(PagedAttentionBadValues, LengthsAreCutAtTheTable) {
  FloatProblem whole({.seq_lens = {16, 16}});
  const auto expected = whole.run_v1();
  FloatProblem longer({.seq_lens = {16, 16}});
  longer.seq_len(0) = 17;
  longer.seq_len(1) = std::numeric_limits<std::int32_t>::max();
  EXPECT_EQ(longer.run_v1(), expected);
  EXPECT_EQ(longer.run_v2(), whole.run_v2());
}

TEST(PagedAttentionBadValues, NegativeLengthsAreEmpty) {
  FloatProblem problem({.seq_lens = {16}});
  problem.seq_len(0) = std::numeric_limits<std::int32_t>::min();
  const std::vector<float> zeros(2 * 32);
  EXPECT_EQ(problem.run_v1(), zeros);
  EXPECT_EQ(problem.run_v2(), zeros);
}

TEST(PagedAttentionBadValues, ABlockThatIsNotInTheCacheIsNotVisible) {
  FloatProblem shorter({.seq_lens = {16}});
  shorter.seq_len(0) = 8;
  FloatProblem problem({.seq_lens = {16}});
  for (const std::int32_t block : {-1, problem.num_blocks(), 2'147'483'647}) {
    problem.table(0, 1) = block;
    for (const float element : problem.run_v1()) EXPECT_TRUE(std::isfinite(element));
    EXPECT_EQ(problem.run_v1(), problem.run_v2());
    problem.table(0, 0) = block;
    EXPECT_EQ(problem.run_v1(), std::vector<float>(2 * 32));
    problem.table(0, 0) = 1;
  }
}

TEST(PagedAttentionV1, TakesWhatSharedMemoryHoldsAndRefusesMore) {
  FloatProblem problem({.seq_lens = {16}});
  const auto expected = problem.run_v1();
  for (const int max_shared_kb : {227, 163, 99}) {
    simt::Options options = simt::options();
    options.max_shared_bytes = max_shared_kb * 1024;
    const simt::ScopedOptions scope(options);
    const std::int64_t limit = max_v1_seq_len(32, options.max_shared_bytes);
    std::vector<std::int32_t> table(static_cast<std::size_t>(limit), 0);
    PagedAttentionParams params = problem.params();
    table[0] = problem.table(0, 0);
    table[1] = problem.table(0, 1);
    params.block_tables = {table.data(), 1, limit, limit, 1};
    params.max_seq_len = limit;
    paged_attention_v1(params, nullptr);
    EXPECT_EQ(std::memcmp(params.out, expected.data(), expected.size() * sizeof(float)), 0);
    params.max_seq_len = limit + 1;
    try {
      paged_attention_v1(params, nullptr);
      ADD_FAILURE() << "not refused";
    } catch (const std::invalid_argument& error) {
      const std::string message = error.what();
      EXPECT_NE(message.find("paged_attention_v2"), std::string::npos) << message;
      EXPECT_NE(message.find(std::to_string(limit)), std::string::npos) << message;
    }
  }
}

TEST(PagedAttentionEmpty, ABatchOfNoneLaunchesNothing) {
  FloatProblem problem({.seq_lens = {}});
  EXPECT_TRUE(problem.run_v1().empty());
  EXPECT_TRUE(problem.run_v2().empty());
}

}  // namespace
}  // namespace paged_kv::cuda::testing
