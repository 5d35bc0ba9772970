// SPDX-License-Identifier: Apache-2.0
//
// What the Python tests cannot do: run the kernels under sanitizers, on threads of our own, and on
// caches too large to exist.
#include "ops/cpu/paged_attention.h"

#include "huge_mapping.h"
#include "ops/cpu/attention_batch.h"
#include "ops/cpu/isa/instruction_sets.h"
#include "sixteen_lanes.h"
#include "test_threads.h"

#include <cmath>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace paged_kv::cpu {
namespace {

// A ragged batch over an nhd cache of float32.
struct Problem {
  static constexpr std::int64_t kHeads = 6, kKvHeads = 2, kHeadSize = 20, kBlockSize = 8;

  std::vector<std::int32_t> starts{0, 1, 34, 34, 36};
  std::vector<std::int32_t> lens{130, 50, 7, 0};
  std::vector<std::int32_t> tables;
  std::vector<float> query, key, value, out, lse;
  std::int64_t max_blocks = 20, num_blocks = 30;

  Problem() {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& data, std::int64_t size) {
      data.resize(static_cast<std::size_t>(size));
      for (float& x : data) x = normal(random);
    };
    fill(query, 36 * kHeads * kHeadSize);
    fill(key, num_blocks * kBlockSize * kKvHeads * kHeadSize);
    fill(value, num_blocks * kBlockSize * kKvHeads * kHeadSize);
    out.assign(query.size(), NAN);
    lse.assign(36 * kHeads, NAN);
    tables.assign(static_cast<std::size_t>(4 * max_blocks), 2'147'480'000);
    std::int32_t next = 0;
    for (std::size_t seq = 0; seq < lens.size(); ++seq) {
      for (std::int32_t i = 0; i * kBlockSize < lens[seq]; ++i) {
        tables[seq * static_cast<std::size_t>(max_blocks) + static_cast<std::size_t>(i)] =
            (next++ * 7) % static_cast<std::int32_t>(num_blocks);
      }
    }
  }

  PagedAttentionParams params(const AttentionKernels& kernels = kScalarKernels) {
    PagedAttentionParams p{};
    p.kernels = &kernels;
    p.batch = {.query_start_loc = {starts.data(), std::ssize(starts), 1},
               .seq_lens = {lens.data(), std::ssize(lens), 1},
               .block_tables = {tables.data(), std::ssize(lens), max_blocks, max_blocks, 1},
               .num_tokens = 36,
               .num_blocks = num_blocks,
               .block_size = kBlockSize,
               .max_query_len = -1,
               .max_seq_len = -1};
    p.mask = {.causal = true, .sliding_window = 0};
    p.cache_type = ElementType::kFloat;
    p.key = side(key.data());
    p.value = side(value.data());
    p.query_type = ElementType::kFloat;
    p.query = query.data();
    p.query_token_stride = p.out_token_stride = kHeads * kHeadSize;
    p.query_head_stride = p.out_head_stride = kHeadSize;
    p.out = out.data();
    p.lse = lse.data();
    p.lse_head_stride = 36;
    p.lse_token_stride = 1;
    p.num_heads = kHeads;
    p.num_kv_heads = kKvHeads;
    p.head_size = kHeadSize;
    p.scale = 0.25f;
    return p;
  }

  static CacheSide side(const float* data) {
    constexpr std::int64_t kFloat = sizeof(float);
    constexpr std::int64_t kToken = kKvHeads * kHeadSize * kFloat;
    return {.data = reinterpret_cast<const std::byte*>(data),
            .block_stride = kBlockSize * kToken,
            .token_stride = kToken,
            .head_stride = kHeadSize * kFloat,
            .dim_stride = kFloat,
            .chunk_size = kHeadSize,
            .chunk_stride = 0,
            .group_stride = 0,
            .scale = {}};
  }
};

// One (query, head) by the definition, in double.
std::vector<double> expected_row(const Problem& p, std::size_t seq, std::int64_t query,
                                 std::int64_t head) {
  const std::int64_t token = p.starts[seq] + query;
  const std::int64_t query_pos = p.lens[seq] - (p.starts[seq + 1] - p.starts[seq]) + query;
  const auto row = [&](const std::vector<float>& cache, std::int64_t pos) {
    const std::int64_t block = p.tables[seq * 20 + static_cast<std::size_t>(pos / p.kBlockSize)];
    return cache.data() +
           ((block * p.kBlockSize + pos % p.kBlockSize) * p.kKvHeads + head / 3) * p.kHeadSize;
  };
  std::vector<double> result(p.kHeadSize, 0.0);
  double sum = 0;
  for (std::int64_t pos = 0; pos <= query_pos; ++pos) {
    double logit = 0;
    for (std::int64_t d = 0; d < p.kHeadSize; ++d) {
      const auto q = static_cast<std::size_t>((token * p.kHeads + head) * p.kHeadSize + d);
      logit += 0.25 * double{p.query[q]} * double{row(p.key, pos)[d]};
    }
    const double weight = std::exp(logit);
    sum += weight;
    for (std::int64_t d = 0; d < p.kHeadSize; ++d) {
      result[static_cast<std::size_t>(d)] += weight * double{row(p.value, pos)[d]};
    }
  }
  for (double& x : result) x = sum > 0 ? x / sum : 0.0;
  return result;
}

// Each instruction set that this machine can run.
class PagedAttention : public ::testing::TestWithParam<const AttentionKernels*> {};

TEST_P(PagedAttention, MatchesTheDefinition) {
  Problem problem;
  paged_attention(problem.params(*GetParam()), kSerialRunner);
  for (std::size_t seq = 0; seq < problem.lens.size(); ++seq) {
    const std::int64_t num_queries = problem.starts[seq + 1] - problem.starts[seq];
    for (std::int64_t query = 0; query < num_queries; ++query) {
      for (std::int64_t head = 0; head < Problem::kHeads; ++head) {
        const auto expected = expected_row(problem, seq, query, head);
        const auto first = static_cast<std::size_t>(
            ((problem.starts[seq] + query) * Problem::kHeads + head) * Problem::kHeadSize);
        for (std::size_t d = 0; d < expected.size(); ++d) {
          ASSERT_NEAR(problem.out[first + d], expected[d], 1e-5) << seq << ' ' << query;
        }
      }
    }
  }
}

TEST_P(PagedAttention, ThreadsGiveTheSameBits) {
  Problem serial;
  paged_attention(serial.params(*GetParam()), kSerialRunner);
  Problem threaded;
  paged_attention(threaded.params(*GetParam()), testing::kFourThreadsRunner);
  EXPECT_EQ(serial.out, threaded.out);
  EXPECT_EQ(serial.lse, threaded.lse);
}

INSTANTIATE_TEST_SUITE_P(InstructionSets, PagedAttention,
                         ::testing::ValuesIn(testing::attention_kernels_to_test()),
                         [](const auto& test) { return std::string(test.param->name); });

// Two blocks that lie 2^31 + 64 elements apart: reserved, but only the used pages exist.
TEST(PagedAttentionOffsets, Have64Bits) {
  constexpr std::int64_t kBlockStride = (std::int64_t{1} << 31) + 64;
  testing::HugeMapping<float> cache(2 * kBlockStride + 4096);
  Problem problem;
  auto params = problem.params();
  problem.starts = {0, 1};
  problem.lens = {1};
  problem.tables = {2};
  params.batch.query_start_loc = {problem.starts.data(), 2, 1};
  params.batch.seq_lens = {problem.lens.data(), 1, 1};
  params.batch.block_tables = {problem.tables.data(), 1, 1, 1, 1};
  params.batch.num_blocks = 3;
  params.key = params.value = Problem::side(cache.data());
  params.key.block_stride = params.value.block_stride = kBlockStride * std::int64_t{sizeof(float)};
  cache.data()[2 * kBlockStride] = 5.0f;

  check_batch(params.batch, params.mask);
  paged_attention(params, kSerialRunner);
  EXPECT_EQ(problem.out[0], 5.0f);
}

TEST(CheckBatch, LooksAtNothingThatIsNotUsed) {
  Problem problem;
  auto params = problem.params();
  check_batch(params.batch, params.mask);
  // Sequence 2 has no queries: its length and table do not matter.
  problem.lens[2] = -5;
  check_batch(params.batch, params.mask);
  // The first query of sequence 0 is at position 129 and sees the keys from 120 on.
  problem.tables[14] = -1;
  EXPECT_THROW(check_batch(params.batch, params.mask), std::invalid_argument);
  params.mask.sliding_window = 10;
  check_batch(params.batch, params.mask);
  problem.tables[15] = 30;
  EXPECT_THROW(check_batch(params.batch, params.mask), std::invalid_argument);
}

}  // namespace
}  // namespace paged_kv::cpu
