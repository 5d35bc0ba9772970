// SPDX-License-Identifier: Apache-2.0
//
// Who gets which work, and what is fetched ahead for it: neither changes a result.
#include "ops/cpu/attention_workers.h"

#include "ops/cpu/isa/instruction_sets.h"
#include "test_threads.h"

#include <array>
#include <atomic>
#include <vector>

#include <gtest/gtest.h>

namespace paged_kv::cpu {
namespace {

using testing::kBackwardsRunner;
using testing::kFourThreadsRunner;

constexpr std::int64_t kHeadSize = 16, kBlockSize = 8, kNumBlocks = 40;

// Two sequences of one query each, of 300 and 3 keys, with one head.
struct Batch {
  Batch() {
    params.kernels = &kScalarKernels;
    params.num_heads = params.num_kv_heads = 1;
    params.head_size = kHeadSize;
    params.scale = 1.0f;
    params.query = query.data();
    params.query_token_stride = params.query_head_stride = kHeadSize;
    params.key = params.value = {
        .data = reinterpret_cast<const std::byte*>(cache.data()),
        .block_stride = kBlockSize * kHeadSize * std::int64_t{sizeof(float)},
        .token_stride = kHeadSize * std::int64_t{sizeof(float)},
        .head_stride = kHeadSize * std::int64_t{sizeof(float)},
        .dim_stride = sizeof(float),
        .chunk_size = kHeadSize,
        .chunk_stride = 0,
        .group_stride = 0,
        .scale = {},
    };
    params.mask = {.causal = true, .sliding_window = 0};
    params.batch = {.query_start_loc = {nullptr, 0, 1},
                    .seq_lens = {lens.data(), 2, 1},
                    .block_tables = {tables.data(), 2, kNumBlocks, kNumBlocks, 1},
                    .num_tokens = 2,
                    .num_blocks = kNumBlocks,
                    .block_size = kBlockSize,
                    .max_query_len = -1,
                    .max_seq_len = -1};
  }

  std::vector<float> query = std::vector<float>(2 * kHeadSize, 0.5f);
  std::vector<float> cache = std::vector<float>(kNumBlocks * kBlockSize * kHeadSize, 0.25f);
  std::array<std::int32_t, 2> lens{300, 3};
  std::vector<std::int32_t> tables = std::vector<std::int32_t>(2 * kNumBlocks);
  PagedAttentionParams params{};
};

constexpr AttentionWork work_of(std::int64_t seq, KeyRange keys) {
  return {{.seq = seq, .kv_head_begin = 0, .num_kv_heads = 1, .query_begin = 0, .num_queries = 1},
          keys};
}

// However often, and whether at all, an item asks what its worker gets next.
TEST(AttentionWorkers, EachItemIsDoneOnce) {
  constexpr std::int64_t kItems = 23;
  Batch batch;
  Scratch scratch;
  for (const ThreadRunner& runner : {kSerialRunner, kBackwardsRunner, kFourThreadsRunner}) {
    for (const std::int64_t num_workers : {1, 3, 30}) {
      std::array<std::atomic<int>, kItems> times_done{};
      for_each_item(batch.params, kItems, num_workers, runner, scratch,
                    [&](AttentionTile&, std::int64_t item, const auto& next_item) {
                      ++times_done[static_cast<std::size_t>(item)];
                      if (item % 3 == 0) return;
                      const std::int64_t next = next_item();
                      EXPECT_NE(next, item);
                      if (item % 3 == 1) {
                        EXPECT_EQ(next_item(), next);
                      }
                    });
      for (const std::atomic<int>& times : times_done) EXPECT_EQ(times, 1);
    }
  }
}

struct Asked {
  const char* what;
  AttentionWork work;
  int num_times;
};

// After the last keys, so that there is something to do while the next ones are fetched.
TEST(AttentionWorkers, ATileAsksOnceWhatIsNext) {
  Batch batch;
  Scratch scratch;
  const std::array asked{
      Asked{"five tiles of keys", work_of(0, {0, 300}), 1},
      Asked{"part of one", work_of(1, {0, 3}), 1},
      Asked{"keys behind the sequence's", work_of(1, {512, 515}), 0},
  };
  for_each_item(batch.params, 1, 1, kSerialRunner, scratch,
                [&](AttentionTile& tile, std::int64_t, const auto&) {
                  for (const Asked& expected : asked) {
                    for (const AttentionWork& next :
                         {AttentionWork{}, work_of(0, {100, 300}), work_of(1, {512, 515})}) {
                      int num_times = 0;
                      tile.run(expected.work, [&] {
                        ++num_times;
                        return next;
                      });
                      EXPECT_EQ(num_times, expected.num_times) << expected.what;
                    }
                  }
                });
}

}  // namespace
}  // namespace paged_kv::cpu
