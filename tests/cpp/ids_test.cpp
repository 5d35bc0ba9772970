// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/ids.h"

#include <type_traits>
#include <unordered_set>

#include <gtest/gtest.h>

namespace paged_kv {
namespace {

template <class A, class B>
concept Comparable = requires(A a, B b) { a == b; };

// Mixing kinds of ids must not compile.
static_assert(!std::is_convertible_v<int, BlockId>);
static_assert(!std::is_convertible_v<BlockId, int>);
static_assert(!std::is_convertible_v<BlockId, GroupId>);
static_assert(!std::is_constructible_v<BlockId, GroupId>);
static_assert(!Comparable<BlockId, GroupId>);
static_assert(Comparable<BlockId, BlockId>);

TEST(StrongId, DefaultIsNoId) {
  EXPECT_FALSE(BlockId().valid());
  EXPECT_EQ(BlockId(), BlockId(-1));
  EXPECT_TRUE(kNullBlockId.valid());
}

TEST(StrongId, OrdersAndHashesByValue) {
  EXPECT_LT(BlockId(3), BlockId(7));
  const std::unordered_set<BlockId> ids{BlockId(1), BlockId(2), BlockId(1)};
  EXPECT_EQ(ids.size(), 2U);
}

}  // namespace
}  // namespace paged_kv
