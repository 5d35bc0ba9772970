// SPDX-License-Identifier: Apache-2.0
//
// Random shapes, layouts, types and features against the definition in double, on each instruction
// set; and random metadata, which is refused or harmless. All memory is exactly as large as it must
// be and what may not be read is NaN, so that a wrong read is an error under ASan or a wrong
// result.
#include "ops/cpu/paged_attention.h"
#include "random_attention.h"
#include "sixteen_lanes.h"
#include "test_threads.h"

#include <array>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace paged_kv::cpu {
namespace {

using testing::index;
using testing::Random;
using testing::RandomAttention;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::uint32_t kNumSeeds = 50;
#else
constexpr std::uint32_t kNumSeeds = 200;
#endif

class AttentionFuzz : public ::testing::TestWithParam<const AttentionKernels*> {};

INSTANTIATE_TEST_SUITE_P(InstructionSets, AttentionFuzz,
                         ::testing::ValuesIn(testing::attention_kernels_to_test()),
                         [](const auto& test) { return std::string(test.param->name); });

TEST_P(AttentionFuzz, MatchesTheDefinitionWithAnyThreads) {
  for (std::uint32_t seed = 0; seed < kNumSeeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RandomAttention problem(seed, *GetParam());
    problem.run(kSerialRunner);
    problem.expect_definition();
    if (HasFatalFailure()) return;
    const auto out = problem.out();
    const auto lse_bits = problem.lse_bits();
    problem.run(testing::kFourThreadsRunner);
    ASSERT_EQ(out, problem.out());
    ASSERT_EQ(lse_bits, problem.lse_bits());
  }
}

// Half of the seeds: these sequences are longer.
TEST_P(AttentionFuzz, PartitionsMatchTheDefinitionWithAnyThreads) {
  for (std::uint32_t seed = 0; seed < kNumSeeds / 2; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RandomAttention problem(seed, *GetParam(), RandomAttention::Kind::kDecode);
    problem.run_partitioned(kSerialRunner);
    problem.expect_definition();
    if (HasFatalFailure()) return;
    const auto out = problem.out();
    const auto partitions = problem.partitions();
    problem.run_partitioned(testing::kFourThreadsRunner);
    ASSERT_EQ(out, problem.out());
    ASSERT_EQ(partitions, problem.partitions());
  }
}

// Whatever the metadata holds, a batch is refused or it runs.
TEST_P(AttentionFuzz, BadMetadataIsRefused) {
  std::int64_t num_refused = 0;
  for (std::uint32_t seed = 0; seed < kNumSeeds; ++seed) {
    RandomAttention problem(seed, *GetParam());
    Random random(seed);
    auto& batch = problem.params().batch;
    constexpr std::array<std::int64_t, 8> kOdd = {-1,
                                                  0,
                                                  1,
                                                  17,
                                                  1 << 20,
                                                  std::numeric_limits<std::int32_t>::max(),
                                                  std::numeric_limits<std::int32_t>::min(),
                                                  std::numeric_limits<std::int32_t>::max() - 1};
    std::vector<std::int32_t> starts(index(batch.num_seqs() + 1));
    for (std::int64_t i = 0; i <= batch.num_seqs(); ++i) {
      starts[index(i)] = static_cast<std::int32_t>(batch.query_begin(i));
    }
    std::vector<std::int32_t> lens(batch.seq_lens.data, batch.seq_lens.data + batch.num_seqs());
    const auto& tables = batch.block_tables;
    std::vector<std::int32_t> ids(tables.data, tables.data + tables.num_rows * tables.num_cols);
    std::vector<std::int32_t>* targets[] = {&starts, &lens, &ids};
    for (std::int64_t i = 0; i < 2; ++i) {
      auto& target = *targets[random.between(0, 2)];
      if (target.empty()) continue;
      target[index(random.between(0, std::ssize(target) - 1))] =
          static_cast<std::int32_t>(random.one_of(kOdd));
    }
    batch.query_start_loc = {starts.data(), std::ssize(starts), 1};
    batch.seq_lens.data = lens.data();
    batch.block_tables.data = ids.data();
    try {
      problem.run(kSerialRunner);
    } catch (const std::invalid_argument&) {
      ++num_refused;
    }
  }
  EXPECT_GT(num_refused, kNumSeeds / 4);
}

}  // namespace
}  // namespace paged_kv::cpu
