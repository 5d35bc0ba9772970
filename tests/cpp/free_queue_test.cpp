// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/free_queue.h"

#include "paged_kv/check.h"

#include <stdexcept>
#include <vector>

#include <gtest/gtest.h>

namespace paged_kv {
namespace {

std::vector<BlockId> ids(std::initializer_list<std::int32_t> values) {
  std::vector<BlockId> result;
  for (const std::int32_t value : values) result.emplace_back(value);
  return result;
}

class FreeQueueTest : public testing::Test {
 protected:
  void expect_order(std::initializer_list<std::int32_t> order) {
    EXPECT_EQ(queue_.get_all_free_blocks(), ids(order));
    EXPECT_EQ(queue_.num_free_blocks(), static_cast<std::int32_t>(order.size()));
    EXPECT_NO_THROW(queue_.check_integrity());
  }

  std::vector<KVCacheBlock> blocks_ = std::vector<KVCacheBlock>(5);
  FreeKVCacheBlockQueue queue_{blocks_};
};

TEST_F(FreeQueueTest, StartsWithAllBlocksInOrder) { expect_order({0, 1, 2, 3, 4}); }

TEST_F(FreeQueueTest, RemovesFromFrontMiddleAndBack) {
  queue_.remove(BlockId(2));
  expect_order({0, 1, 3, 4});
  queue_.remove(BlockId(0));
  expect_order({1, 3, 4});
  queue_.remove(BlockId(4));
  expect_order({1, 3});
  queue_.remove(BlockId(1));
  queue_.remove(BlockId(3));
  expect_order({});
}

TEST_F(FreeQueueTest, AppendsAndPrependsInTheGivenOrder) {
  std::vector<BlockId> popped(4);
  queue_.popleft_n(popped);
  EXPECT_EQ(popped, ids({0, 1, 2, 3}));
  queue_.prepend_n(ids({2, 0}));
  expect_order({2, 0, 4});
  queue_.append_n(ids({3, 1}));
  expect_order({2, 0, 4, 3, 1});
}

TEST_F(FreeQueueTest, FillsAnEmptiedQueueFromEitherEnd) {
  std::vector<BlockId> popped(5);
  queue_.popleft_n(popped);
  queue_.append(BlockId(3));
  expect_order({3});
  EXPECT_EQ(queue_.popleft(), BlockId(3));
  queue_.prepend_n(ids({1, 2}));
  expect_order({1, 2});
}

TEST_F(FreeQueueTest, AFailedCallChangesNothing) {
  EXPECT_EQ(queue_.popleft(), BlockId(0));
  EXPECT_EQ(queue_.popleft(), BlockId(1));
  EXPECT_THROW(queue_.append_n(ids({0, 3})), std::invalid_argument);      // 3 is in the queue
  EXPECT_THROW(queue_.prepend_n(ids({0, 1, 0})), std::invalid_argument);  // 0 is given twice
  EXPECT_THROW(queue_.append(BlockId(5)), std::invalid_argument);
  EXPECT_THROW(queue_.append(BlockId(-1)), std::invalid_argument);
  EXPECT_THROW(queue_.remove(BlockId(0)), std::invalid_argument);
  EXPECT_THROW(queue_.remove(BlockId(5)), std::invalid_argument);
  std::vector<BlockId> popped(4);
  EXPECT_THROW(queue_.popleft_n(popped), std::invalid_argument);
  expect_order({2, 3, 4});
}

TEST_F(FreeQueueTest, RefusesBlocksOfAnotherQueue) {
  EXPECT_THROW(FreeKVCacheBlockQueue{blocks_}, std::invalid_argument);
}

TEST_F(FreeQueueTest, CheckIntegrityFindsEachKindOfDamage) {
  const std::vector<KVCacheBlock> good = blocks_;
  const auto expect_found = [&] {
    EXPECT_THROW(queue_.check_integrity(), InvariantError);
    blocks_ = good;
    EXPECT_NO_THROW(queue_.check_integrity());
  };
  blocks_[2].in_free_queue = false;
  expect_found();
  blocks_[2].prev_free_block = BlockId(0);
  expect_found();
  blocks_[2].next_free_block = BlockId(4);
  expect_found();
  blocks_[3].next_free_block = BlockId();
  expect_found();
  blocks_[4].next_free_block = BlockId(0);
  expect_found();
}

TEST(FreeQueue, OfNoBlocksIsEmpty) {
  FreeKVCacheBlockQueue queue{std::span<KVCacheBlock>()};
  EXPECT_EQ(queue.num_free_blocks(), 0);
  EXPECT_THROW(static_cast<void>(queue.popleft()), std::invalid_argument);
  EXPECT_NO_THROW(queue.check_integrity());
}

}  // namespace
}  // namespace paged_kv
