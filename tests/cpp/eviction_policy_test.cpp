// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/eviction_policy.h"

#include "paged_kv/block_pool.h"
#include "paged_kv/evicted_keys.h"

#include <gtest/gtest.h>

namespace paged_kv {
namespace {

std::vector<BlockId> ids(std::initializer_list<std::int32_t> values) {
  return {values.begin(), values.end()};
}

BlockHash hash_of(std::uint8_t value) {
  BlockHash hash;
  hash.bytes[0] = value;
  return hash;
}

// The other way round than lru_place(), and counts how often it is asked.
class Opposite final : public EvictionPolicy {
 public:
  FreePlace place(const KVCacheBlock& block) noexcept override {
    ++num_calls;
    EXPECT_EQ(block.ref_cnt, 0);
    return lru_place(block) == FreePlace::kBack ? FreePlace::kFront : FreePlace::kBack;
  }
  int num_calls = 0;
};

// Blocks 1 .. 3 of five, of which 1 and 2 have a hash.
void fill(BlockPool& pool) {
  const std::vector<BlockId> blocks = pool.get_new_blocks(3);
  const std::vector<BlockHash> hashes{hash_of(1), hash_of(2)};
  pool.cache_full_blocks(hashes, blocks, 0, 2, 4, GroupId(0));
}

TEST(EvictionPolicy, WithoutOneThePoolIsLru) {
  BlockPool pool(6, true, 4);
  fill(pool);
  pool.free_blocks(ids({3, 2, 1}));
  EXPECT_EQ(pool.free_block_queue().get_all_free_blocks(), ids({3, 4, 5, 2, 1}));
}

TEST(EvictionPolicy, DecidesTheEndOfTheQueueAndNotTheOrderWithin) {
  const auto policy = std::make_shared<Opposite>();
  BlockPool pool(6, true, 4, false, nullptr, policy);
  fill(pool);
  pool.touch(ids({1}));
  pool.free_blocks(ids({3, 2, 1}));
  EXPECT_EQ(policy->num_calls, 2);  // block 1 is still held
  EXPECT_EQ(pool.free_block_queue().get_all_free_blocks(), ids({2, 4, 5, 3}));
  pool.free_blocks(ids({1}));
  EXPECT_EQ(pool.free_block_queue().get_all_free_blocks(), ids({1, 2, 4, 5, 3}));
  pool.check_integrity();
}

TEST(EvictionPolicy, IsNotAskedByACallThatFails) {
  const auto policy = std::make_shared<Opposite>();
  BlockPool pool(6, true, 4, false, nullptr, policy);
  fill(pool);
  EXPECT_THROW(pool.free_blocks(ids({1, 4})), std::invalid_argument);
  EXPECT_EQ(policy->num_calls, 0);
  EXPECT_EQ(pool.blocks()[1].ref_cnt, 1);
  EXPECT_EQ(pool.get_num_free_blocks(), 2);
}

TEST(EvictionPolicy, HitsAreCountedUntilTheBlockIsHandedOutAgain) {
  BlockPool pool(2, true, 4);
  const auto blocks = pool.get_new_blocks(1);
  EXPECT_EQ(pool.blocks()[1].num_hits, 0);
  for (int i = 0; i < 70'000; ++i) pool.touch(blocks);
  for (int i = 0; i < 70'001; ++i) pool.free_blocks(blocks);
  EXPECT_EQ(pool.blocks()[1].num_hits, 65'535);
  static_cast<void>(pool.get_new_blocks(1));
  EXPECT_EQ(pool.blocks()[1].num_hits, 0);
}

TEST(EvictedKeys, RemembersTheLastOnes) {
  EvictedKeys keys(2);
  const auto key = [](std::uint8_t value) {
    return BlockHashWithGroupId{hash_of(value), GroupId(0)};
  };
  keys.push(key(1));
  keys.push(key(2));
  EXPECT_TRUE(keys.contains(key(1)));
  keys.push(key(3));
  EXPECT_FALSE(keys.contains(key(1)));
  EXPECT_TRUE(keys.contains(key(2)));
  keys.push(key(3));
  keys.push(key(4));
  EXPECT_TRUE(keys.contains(key(3)));
  keys.clear();
  EXPECT_FALSE(keys.contains(key(4)));
  keys.push(key(4));
  EXPECT_TRUE(keys.contains(key(4)));

  EvictedKeys none(0);
  none.push(key(1));
  EXPECT_FALSE(none.contains(key(1)));
  EXPECT_THROW(EvictedKeys(-1), std::invalid_argument);
}

}  // namespace
}  // namespace paged_kv
