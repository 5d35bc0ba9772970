// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/cuda/paged_attention_config.h"

#include <gtest/gtest.h>

namespace paged_kv::cuda {
namespace {

constexpr std::int64_t kSharedSm90 = 227 * 1024;
constexpr std::int64_t kSharedSm80 = 163 * 1024;
constexpr std::int64_t kSharedSm86 = 99 * 1024;

TEST(PagedAttentionConfig, EachPartitionHas512Tokens) {
  EXPECT_EQ(num_partitions(0), 1);
  EXPECT_EQ(num_partitions(512), 1);
  EXPECT_EQ(num_partitions(513), 2);
  EXPECT_EQ(num_partitions(std::int64_t{1} << 40), std::int64_t{1} << 31);
}

TEST(PagedAttentionConfig, HeadsAreWholeChunksOfTheCache) {
  for (const std::int64_t head_size : kHeadSizes) {
    EXPECT_TRUE(is_supported_head_size(head_size, 4));
    EXPECT_TRUE(is_supported_head_size(head_size, 2));
    EXPECT_EQ(is_supported_head_size(head_size, 1), head_size != 120);
  }
  EXPECT_FALSE(is_supported_head_size(0, 2));
  EXPECT_FALSE(is_supported_head_size(48, 2));
  EXPECT_FALSE(is_supported_head_size(512, 2));
}

TEST(PagedAttentionConfig, BlocksAreWholeVectorsOfTokens) {
  for (const std::int64_t block_size : {8, 16, 24, 32, 64, 128, 256}) {
    EXPECT_TRUE(is_supported_block_size(block_size));
  }
  for (const std::int64_t block_size : {-8, 0, 1, 4, 12, 31}) {
    EXPECT_FALSE(is_supported_block_size(block_size));
  }
}

TEST(PagedAttentionConfig, SharedMemory) {
  // 128 + 4 * 128 + 8 floats, rounded up to 128 bytes.
  static_assert(static_shared_bytes(128) == 2688);
  static_assert(logits_bytes(0) == 0);
  static_assert(logits_bytes(1) == 128);
  static_assert(logits_bytes(kPartitionSize) == 2048);
}

TEST(PagedAttentionConfig, TheLongestSequenceOfV1FitsAndOneMoreTileDoesNot) {
  static_assert(max_v1_seq_len(128, kSharedSm90) == 57440);
  static_assert(max_v1_seq_len(128, kSharedSm80) == 41056);
  static_assert(max_v1_seq_len(128, kSharedSm86) == 24672);
  static_assert(max_v1_seq_len(256, 1024) == 0);
  for (const std::int64_t head_size : kHeadSizes) {
    for (const std::int64_t limit : {kSharedSm90, kSharedSm80, kSharedSm86}) {
      const std::int64_t longest = max_v1_seq_len(head_size, limit);
      EXPECT_LE(static_shared_bytes(head_size) + logits_bytes(longest), limit);
      EXPECT_GT(static_shared_bytes(head_size) + logits_bytes(longest + 1), limit);
    }
  }
}

TEST(PagedAttentionConfig, ChoiceOfV1) {
  static_assert(use_v1(512, 1, 8, 128, kSharedSm90));
  static_assert(!use_v1(513, 1, 8, 128, kSharedSm90));
  static_assert(!use_v1(513, 64, 8, 128, kSharedSm90));  // 512 rows
  static_assert(use_v1(513, 57, 9, 128, kSharedSm90));
  static_assert(use_v1(8192, 65, 8, 128, kSharedSm90));
  static_assert(!use_v1(8193, 65, 8, 128, kSharedSm90));
  static_assert(!use_v1(8192, 65, 8, 128, 16 * 1024));  // does not fit
}

TEST(PagedAttentionConfig, WhereV1IsChosenItFitsEveryDevice) {
  constexpr std::int64_t kWithoutOptIn = 48 * 1024;
  for (const std::int64_t head_size : kHeadSizes) {
    EXPECT_TRUE(use_v1(8192, 65, 8, head_size, kWithoutOptIn));
  }
}

}  // namespace
}  // namespace paged_kv::cuda
