// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/huge_pages.h"

#include <cstdint>
#include <new>
#include <numeric>

#include <gtest/gtest.h>

namespace paged_kv {
namespace {

TEST(HugePages, LargeArraysBeginAtAPage) {
  const HugePageVector<char> large(kHugePageBytes + 1);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(large.data()) % kHugePageBytes, 0U);
  const HugePageVector<char> small(1);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(small.data()) % 64, 0U);
}

TEST(HugePages, AVectorKeepsItsContentOverTheLimit) {
  HugePageVector<std::int64_t> numbers;
  for (std::int64_t i = 0; i < 600'000; ++i) numbers.push_back(i);
  EXPECT_EQ(std::accumulate(numbers.begin(), numbers.end(), std::int64_t{0}),
            std::int64_t{599'999} * 300'000);
}

TEST(HugePages, TooMuchIsRefused) {
  HugePageAllocator<std::int64_t> allocator;
  EXPECT_THROW(static_cast<void>(allocator.allocate(~std::size_t{0})), std::bad_alloc);
}

}  // namespace
}  // namespace paged_kv
