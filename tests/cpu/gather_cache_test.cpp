// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/gather_cache.h"

#include "huge_mapping.h"
#include "test_threads.h"

#include <cstdint>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <vector>

#include <gtest/gtest.h>

namespace paged_kv::cpu {
namespace {

using testing::HugeMapping;
using testing::kBackwardsRunner;
using testing::kFourThreadsRunner;

constexpr std::int32_t kAbsurd = std::numeric_limits<std::int32_t>::max();

// Block size 4, rows of one head with two dims; element (block, offset, dim) is its own index.
struct Case {
  std::int64_t num_blocks = 6;
  std::int64_t block_size = 4;
  std::int64_t head_size = 2;
  std::vector<std::uint32_t> cache;
  std::vector<std::uint32_t> out;
  std::vector<std::int32_t> block_tables;
  std::vector<std::int32_t> cu_seq_lens;
  std::vector<std::int32_t> seq_starts;

  Case(std::vector<std::int32_t> tables, std::vector<std::int32_t> cu_lens,
       std::vector<std::int32_t> starts, std::size_t num_out_tokens)
      : block_tables(std::move(tables)),
        cu_seq_lens(std::move(cu_lens)),
        seq_starts(std::move(starts)) {
    cache.resize(static_cast<std::size_t>(num_blocks * block_size * head_size));
    std::iota(cache.begin(), cache.end(), 0U);
    out.assign(num_out_tokens * 2, 999U);
  }

  void gather(const ThreadRunner& runner) {
    const auto num_seqs = static_cast<std::int64_t>(cu_seq_lens.size()) - 1;
    const std::int64_t width = static_cast<std::int64_t>(block_tables.size()) / num_seqs;
    gather_cache({.cache = cache.data(),
                  .out = out.data(),
                  .block_tables = {block_tables.data(), num_seqs, width, width, 1},
                  .cu_seq_lens = {cu_seq_lens.data(), num_seqs + 1, 1},
                  .seq_starts = {seq_starts.empty() ? nullptr : seq_starts.data(), num_seqs, 1},
                  .num_blocks = num_blocks,
                  .block_size = block_size,
                  .num_kv_heads = 1,
                  .head_size = head_size,
                  .block_stride = block_size * head_size,
                  .offset_stride = head_size,
                  .cache_strides = {head_size, 1},
                  .num_out_tokens = static_cast<std::int64_t>(out.size()) / 2,
                  .out_token_stride = head_size,
                  .out_strides = {head_size, 1},
                  .element_size = 4},
                 runner);
  }

  // The slots whose tokens are in `out`.
  [[nodiscard]] std::vector<std::uint32_t> slots() const {
    std::vector<std::uint32_t> result;
    for (std::size_t i = 0; i < out.size(); i += 2) {
      result.push_back(out[i] == 999U ? 999U : out[i] / 2);
    }
    return result;
  }
};

TEST(GatherCache, FollowsTheBlockTable) {
  for (const ThreadRunner& runner : {kSerialRunner, kBackwardsRunner, kFourThreadsRunner}) {
    // 5 tokens, none, 3 tokens; unused table entries are absurd; one row of `out` is spare.
    Case c({5, 2, kAbsurd, -1, kAbsurd, kAbsurd, 1, kAbsurd, -7}, {0, 5, 5, 8}, {}, 9);
    c.gather(runner);
    EXPECT_EQ(c.slots(), (std::vector<std::uint32_t>{20, 21, 22, 23, 8, 4, 5, 6, 999}));
  }
}

TEST(GatherCache, StartsAtAnyToken) {
  Case c({kAbsurd, 3, 0, 2, 4, kAbsurd}, {0, 4, 6}, {5, 3}, 6);
  c.gather(kFourThreadsRunner);
  // Tokens 5..8 of sequence 0 (blocks 3 and 0), tokens 3..4 of sequence 1 (blocks 2 and 4).
  EXPECT_EQ(c.slots(), (std::vector<std::uint32_t>{13, 14, 15, 0, 11, 16}));
}

TEST(GatherCache, BadIndicesWriteNothing) {
  const std::vector<Case> cases{
      Case({0, 6}, {0, 5}, {}, 5),          // block past the end
      Case({0, -1}, {0, 5}, {}, 5),         // negative block
      Case({0, 1}, {0, 9}, {}, 9),          // more tokens than the table covers
      Case({0, 1}, {0, 4}, {5}, 4),         // the same, because of the start
      Case({0, 1}, {0, 5}, {}, 4),          // out too short
      Case({0, 1}, {0, 5}, {-1}, 5),        // negative start
      Case({0, 1}, {1, 5}, {}, 5),          // does not start at 0
      Case({0, 1, 2, 3}, {0, 5, 3}, {}, 5)  // decreases
  };
  for (Case c : cases) {
    EXPECT_THROW(c.gather(kSerialRunner), std::invalid_argument);
    EXPECT_EQ(c.out, std::vector<std::uint32_t>(c.out.size(), 999U));
  }
}

TEST(GatherCache, OffsetsAre64Bit) {
  constexpr std::int64_t kStride = (std::int64_t{1} << 31) + 16;
  HugeMapping<std::uint32_t> cache(2 * kStride);
  cache.data()[kStride + 3 * 2] = 42;
  const std::int32_t table = 1;
  const std::vector<std::int32_t> cu_seq_lens{0, 1};
  const std::int32_t start = 3;
  std::vector<std::uint32_t> out(2);
  gather_cache({.cache = cache.data(),
                .out = out.data(),
                .block_tables = {&table, 1, 1, 1, 1},
                .cu_seq_lens = {cu_seq_lens.data(), 2, 1},
                .seq_starts = {&start, 1, 1},
                .num_blocks = 2,
                .block_size = 4,
                .num_kv_heads = 1,
                .head_size = 2,
                .block_stride = kStride,
                .offset_stride = 2,
                .cache_strides = {2, 1},
                .num_out_tokens = 1,
                .out_token_stride = 2,
                .out_strides = {2, 1},
                .element_size = 4},
               kSerialRunner);
  EXPECT_EQ(out[0], 42U);
}

}  // namespace
}  // namespace paged_kv::cpu
