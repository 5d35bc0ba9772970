// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/block_hash_map.h"

#include <map>
#include <random>
#include <stdexcept>
#include <vector>

#include <gtest/gtest.h>

namespace paged_kv {
namespace {

// Few distinct bits, so that many keys share their place in the table.
BlockHashWithGroupId key(int value, int group = 0) {
  BlockHashWithGroupId result{{}, GroupId(group)};
  result.hash.bytes[0] = static_cast<std::uint8_t>(value % 3);
  result.hash.bytes[31] = static_cast<std::uint8_t>(value);
  return result;
}

TEST(BlockHashMap, GivesTheFirstInsertedOfTheBlocksWithAKey) {
  BlockHashToBlockMap map;
  for (const int block : {7, 3, 9}) map.insert(key(1), BlockId(block));
  EXPECT_EQ(map.size(), 1U);
  EXPECT_EQ(map.num_entries(), 3U);
  EXPECT_EQ(map.get_one_block(key(1)), BlockId(7));
  EXPECT_TRUE(map.pop(key(1), BlockId(3)));
  EXPECT_EQ(map.get_one_block(key(1)), BlockId(7));
  EXPECT_TRUE(map.pop(key(1), BlockId(7)));
  EXPECT_EQ(map.get_one_block(key(1)), BlockId(9));
  EXPECT_TRUE(map.pop(key(1), BlockId(9)));
  EXPECT_EQ(map.get_one_block(key(1)), std::nullopt);
  EXPECT_EQ(map.size(), 0U);
  map.check_integrity();
}

TEST(BlockHashMap, GroupsAreKeptApart) {
  BlockHashToBlockMap map;
  map.insert(key(1, 0), BlockId(5));
  EXPECT_EQ(map.get_one_block(key(1, 1)), std::nullopt);
  map.insert(key(1, 1), BlockId(6));
  EXPECT_EQ(map.get_one_block(key(1, 0)), BlockId(5));
  EXPECT_EQ(map.size(), 2U);
}

TEST(BlockHashMap, PoppingAnotherBlockChangesNothing) {
  BlockHashToBlockMap map;
  map.insert(key(1), BlockId(5));
  EXPECT_FALSE(map.pop(key(1), BlockId(6)));
  EXPECT_FALSE(map.pop(key(2), BlockId(5)));
  EXPECT_TRUE(map.contain(key(1), BlockId(5)));
}

TEST(BlockHashMap, InsertingAPairAgainKeepsItsPlace) {
  BlockHashToBlockMap map;
  map.insert(key(1), BlockId(5));
  map.insert(key(1), BlockId(6));
  map.insert(key(1), BlockId(5));
  EXPECT_EQ(map.get_all_blocks(key(1)), (std::vector{BlockId(5), BlockId(6)}));
  EXPECT_THROW(map.insert(key(1), BlockId(-1)), std::invalid_argument);
}

TEST(BlockHashMap, OneBlockMayHaveSeveralKeys) {
  BlockHashToBlockMap map;
  map.insert(key(1), BlockId(5));
  map.insert(key(2), BlockId(5));
  EXPECT_TRUE(map.pop(key(1), BlockId(5)));
  EXPECT_EQ(map.get_one_block(key(2)), BlockId(5));
}

TEST(BlockHashMap, ClearForgetsAllAndCanBeFilledAgain) {
  BlockHashToBlockMap map;
  for (int i = 0; i < 100; ++i) map.insert(key(i), BlockId(i));
  map.clear();
  EXPECT_EQ(map.size(), 0U);
  EXPECT_EQ(map.get_one_block(key(3)), std::nullopt);
  map.insert(key(3), BlockId(4));
  EXPECT_EQ(map.get_one_block(key(3)), BlockId(4));
  map.check_integrity();
}

TEST(BlockHashMap, BehavesLikeAMapOfListsUnderRandomCalls) {
  std::mt19937 random(1);
  const auto below = [&](int bound) {
    return static_cast<int>(random() % static_cast<unsigned>(bound));
  };
  BlockHashToBlockMap map;
  std::map<int, std::vector<BlockId>> model;
  for (int step = 0; step < 20'000; ++step) {
    const int k = below(40);
    const BlockId block(below(12));
    std::vector<BlockId>& blocks = model[k];
    const auto place = std::find(blocks.begin(), blocks.end(), block);
    if (below(2) == 0) {
      map.insert(key(k), block);
      if (place == blocks.end()) blocks.push_back(block);
    } else {
      EXPECT_EQ(map.pop(key(k), block), place != blocks.end());
      if (place != blocks.end()) blocks.erase(place);
    }
    ASSERT_EQ(map.get_all_blocks(key(k)), blocks);
    if (step % 500 == 0) {
      ASSERT_NO_THROW(map.check_integrity());
      for (const auto& [other, expected] : model) {
        ASSERT_EQ(map.get_all_blocks(key(other)), expected);
      }
    }
  }
}

// A prompt of whole blocks, sent again and again, makes a block with the same key each time.
TEST(BlockHashMap, ManyBlocksWithOneKeyDoNotSlowEachOtherDown) {
  BlockHashToBlockMap map;
  constexpr int kNumBlocks = 200'000;  // quadratic cost would take minutes
  for (int i = 0; i < kNumBlocks; ++i) map.insert(key(1), BlockId(i));
  for (int i = kNumBlocks - 1; i > 0; --i) map.pop(key(1), BlockId(i));
  EXPECT_EQ(map.get_all_blocks(key(1)), std::vector{BlockId(0)});
}

}  // namespace
}  // namespace paged_kv
