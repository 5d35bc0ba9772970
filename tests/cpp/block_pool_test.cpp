// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/block_pool.h"

#include "paged_kv/check.h"
#include "paged_kv/kv_cache_blocks.h"

#include <stdexcept>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>

namespace paged_kv {
namespace {

static_assert(!std::is_copy_constructible_v<BlockPool>);
static_assert(!std::is_move_constructible_v<BlockPool>);

constexpr GroupId kGroup{0};

std::vector<BlockHash> make_hashes(int num_hashes, int seed = 0) {
  std::vector<BlockHash> hashes;
  for (int i = 0; i < num_hashes; ++i) {
    hashes.push_back(make_none_hash(concat(seed, ".", i)));
  }
  return hashes;
}

std::vector<BlockId> reversed(std::vector<BlockId> ids) { return {ids.rbegin(), ids.rend()}; }

bool operator==(const BlockPoolDump& a, const BlockPoolDump& b) {
  return a.free_order == b.free_order && a.ref_counts == b.ref_counts && a.hash_map == b.hash_map;
}

TEST(BlockPool, SharedPrefixLivesUntilItsBlockIsReused) {
  BlockPool pool(4, true, 16);
  const auto hashes = make_hashes(1);
  const std::vector<BlockId> held = pool.get_new_blocks(1);
  pool.cache_full_blocks(hashes, held, 0, 1, 16, kGroup);
  const auto ref_cnt = [&] { return pool.blocks()[held[0].index()].ref_cnt; };
  EXPECT_EQ(ref_cnt(), 1);

  const auto hit = pool.find_cached_prefix(hashes, 1, 16, kGroup);
  EXPECT_EQ(hit, held);
  pool.touch(hit);
  EXPECT_EQ(ref_cnt(), 2);
  pool.free_blocks(held);
  EXPECT_EQ(ref_cnt(), 1);
  EXPECT_EQ(pool.get_num_free_blocks(), 2);
  pool.free_blocks(hit);
  EXPECT_EQ(ref_cnt(), 0);
  EXPECT_EQ(pool.dump().free_order, (std::vector{BlockId(2), BlockId(3), held[0]}));
  EXPECT_EQ(pool.find_cached_prefix(hashes, 1, 16, kGroup), held);

  static_cast<void>(pool.get_new_blocks(2));
  EXPECT_EQ(pool.find_cached_prefix(hashes, 1, 16, kGroup), held);
  EXPECT_EQ(pool.get_new_blocks(1), held);
  EXPECT_TRUE(pool.find_cached_prefix(hashes, 1, 16, kGroup).empty());
  pool.check_integrity();
}

TEST(BlockPool, AFailedCallChangesNothing) {
  BlockPool pool(8, true, 16);
  const auto held = pool.get_new_blocks(4);
  pool.cache_full_blocks(make_hashes(1), held, 0, 1, 16, kGroup);
  const auto free_block = std::vector{BlockId(7)};
  const BlockPoolDump before = pool.dump();
  const auto other = make_hashes(4, 1);

  EXPECT_THROW(static_cast<void>(pool.get_new_blocks(4)), OutOfBlocksError);
  EXPECT_THROW(static_cast<void>(pool.get_new_blocks(-1)), std::invalid_argument);
  EXPECT_THROW(pool.touch(std::vector{held[0], BlockId(8)}), std::invalid_argument);
  EXPECT_THROW(pool.free_blocks(std::vector{held[0], held[1], held[0]}), std::invalid_argument);
  EXPECT_THROW(pool.free_blocks(free_block), std::invalid_argument);
  EXPECT_THROW(pool.evict_blocks(std::vector{held[0], BlockId(-1)}), std::invalid_argument);
  // Blocks 1 to 3 could be cached, block 0 has another content.
  EXPECT_THROW(pool.cache_full_blocks(other, reversed(held), 0, 4, 16, kGroup),
               std::invalid_argument);
  // One block twice: it cannot have two contents.
  EXPECT_THROW(pool.cache_full_blocks(other, std::vector{held[1], held[1]}, 0, 2, 16, kGroup),
               std::invalid_argument);
  EXPECT_THROW(pool.cache_full_blocks(other, std::vector{held[1], free_block[0]}, 0, 2, 16, kGroup),
               std::invalid_argument);
  EXPECT_TRUE(pool.dump() == before);
  pool.check_integrity();
}

TEST(BlockPool, RefusesCountsThatDoNotFit) {
  BlockPool pool(8, true, 16);
  const auto held = pool.get_new_blocks(3);
  const auto hashes = make_hashes(3);
  const auto expect_refused = [&](std::int64_t num_cached, std::int64_t num_full,
                                  std::int64_t block_size, GroupId group) {
    EXPECT_THROW(pool.cache_full_blocks(hashes, held, num_cached, num_full, block_size, group),
                 std::invalid_argument);
  };
  expect_refused(-1, 1, 16, kGroup);
  expect_refused(0, 4, 16, kGroup);
  expect_refused(0, 1, 24, kGroup);
  expect_refused(0, 2, 32, kGroup);
  expect_refused(0, 1, 16, GroupId(-1));
  const std::vector<std::uint8_t> short_mask{1};
  EXPECT_THROW(pool.cache_full_blocks(hashes, held, 0, 2, 16, kGroup, short_mask),
               std::invalid_argument);
  EXPECT_TRUE(pool.dump().hash_map.empty());
}

TEST(BlockPool, MillionCyclesOfOneBlock) {
  BlockPool pool(2, true, 16);
  const auto hashes = make_hashes(1);
  for (int i = 0; i < 1'000'000; ++i) {
    const auto block = pool.get_new_blocks(1);
    if (i % 2 == 0) pool.cache_full_blocks(hashes, block, 0, 1, 16, kGroup);
    pool.free_blocks(block);
  }
  EXPECT_EQ(pool.get_num_free_blocks(), 1);
  EXPECT_LE(pool.cached_block_hash_to_block().num_entries(), 1U);
  pool.check_integrity();
}

TEST(KVCacheBlocks, AddsGroupByGroup) {
  const KVCacheBlocks a{{{BlockId(1)}, {BlockId(2), BlockId(3)}}};
  const KVCacheBlocks b{{{BlockId(4)}, {}}};
  EXPECT_EQ(a + b, (KVCacheBlocks{{{BlockId(1), BlockId(4)}, {BlockId(2), BlockId(3)}}}));
  EXPECT_EQ(a.new_empty(), (KVCacheBlocks{{{}, {}}}));
  EXPECT_THROW(static_cast<void>(a + KVCacheBlocks{}), std::invalid_argument);
}

}  // namespace
}  // namespace paged_kv
