// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/block_copy.h"

#include "huge_mapping.h"
#include "test_threads.h"

#include <array>
#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <vector>

#include <gtest/gtest.h>

namespace paged_kv::cpu {
namespace {

using testing::HugeMapping;
using testing::kFourThreadsRunner;

using Pairs = std::vector<std::int64_t>;

BlockMapping mapping_of(const Pairs& pairs) {
  return {pairs.data(), static_cast<std::int64_t>(pairs.size()) / 2, 2, 2, 1};
}

std::vector<std::int32_t> numbered(std::size_t size) {
  std::vector<std::int32_t> data(size);
  std::iota(data.begin(), data.end(), 0);
  return data;
}

BlockedCache dense_cache(std::vector<std::int32_t>& data, std::int64_t block_elements) {
  return {reinterpret_cast<std::byte*>(data.data()),
          static_cast<std::int64_t>(data.size()) / block_elements, block_elements * 4,
          BlockShape(std::array{block_elements}, std::array{std::int64_t{1}}, 4)};
}

TEST(BlockShape, DenseBlocksAreOneRunInAnyOrderOfDimensions) {
  const BlockShape nhd(std::array<std::int64_t, 3>{16, 2, 8}, std::array<std::int64_t, 3>{16, 8, 1},
                       2);
  EXPECT_EQ(nhd.num_runs(), 1);
  EXPECT_EQ(nhd.run_bytes(), 16 * 2 * 8 * 2);
  const BlockShape hnd(std::array<std::int64_t, 3>{16, 2, 8},
                       std::array<std::int64_t, 3>{8, 128, 1}, 2);
  EXPECT_EQ(hnd.num_runs(), 1);
  EXPECT_EQ(hnd.run_bytes(), nhd.run_bytes());
}

TEST(BlockShape, SliceOfAWiderTensorIsRunsOfItsOwnWidth) {
  const BlockShape slice(std::array<std::int64_t, 3>{16, 2, 8},
                         std::array<std::int64_t, 3>{16, 256, 1}, 2);
  EXPECT_EQ(slice.num_runs(), 16 * 2);
  EXPECT_EQ(slice.run_bytes(), 8 * 2);
}

TEST(BlockShape, CopyLeavesTheGapsAlone) {
  const std::vector<std::int32_t> src = numbered(12);
  std::vector<std::int32_t> dst(12, -1);
  const BlockShape shape(std::array<std::int64_t, 2>{3, 2}, std::array<std::int64_t, 2>{4, 1}, 4);
  shape.copy(reinterpret_cast<const std::byte*>(src.data()),
             reinterpret_cast<std::byte*>(dst.data()));
  EXPECT_EQ(dst, (std::vector<std::int32_t>{0, 1, -1, -1, 4, 5, -1, -1, 8, 9, -1, -1}));
}

TEST(BlockShape, BlockWithoutElementsCopiesNothing) {
  const BlockShape shape(std::array<std::int64_t, 2>{0, 2}, std::array<std::int64_t, 2>{2, 1}, 4);
  EXPECT_EQ(shape.num_bytes(), 0);
  shape.copy(nullptr, nullptr);
}

TEST(CopyBlocks, CopiesEveryPairInEveryCache) {
  std::vector<std::int32_t> first = numbered(5 * 8);
  std::vector<std::int32_t> second = numbered(5 * 2);
  const std::vector<BlockedCache> caches{dense_cache(first, 8), dense_cache(second, 2)};
  copy_blocks(caches, mapping_of({1, 3, 1, 0}), kFourThreadsRunner);
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(first[i], 8 + static_cast<int>(i));
    EXPECT_EQ(first[8 + i], 8 + static_cast<int>(i));
    EXPECT_EQ(first[16 + i], 16 + static_cast<int>(i));
    EXPECT_EQ(first[24 + i], 8 + static_cast<int>(i));
    EXPECT_EQ(first[32 + i], 32 + static_cast<int>(i));
  }
  EXPECT_EQ(second, (std::vector<std::int32_t>{2, 3, 2, 3, 4, 5, 2, 3, 8, 9}));
}

TEST(CopyBlocks, BadPairsChangeNothing) {
  std::vector<std::int32_t> data = numbered(5 * 2);
  const std::vector<BlockedCache> caches{dense_cache(data, 2)};
  for (const Pairs& pairs : {Pairs{0, 1, 2, 5}, Pairs{0, 1, -1, 2}, Pairs{0, 1, 5, 2},
                             Pairs{0, 1, 2, 1}, Pairs{0, 1, 1, 2}, Pairs{3, 3}, Pairs{0, -1}}) {
    EXPECT_THROW(copy_blocks(caches, mapping_of(pairs), kSerialRunner), std::invalid_argument);
    EXPECT_EQ(data, numbered(5 * 2));
  }
}

TEST(CopyBlocks, OffsetsAre64Bit) {
  constexpr std::int64_t kStride = std::int64_t{1} << 33;
  HugeMapping<std::byte> cache(3 * kStride);
  cache.data()[kStride] = std::byte{7};
  const std::vector<BlockedCache> caches{
      {cache.data(), 3, kStride,
       BlockShape(std::array<std::int64_t, 1>{64}, std::array<std::int64_t, 1>{1}, 1)}};
  copy_blocks(caches, mapping_of({1, 2}), kSerialRunner);
  EXPECT_EQ(cache.data()[2 * kStride], std::byte{7});
  EXPECT_EQ(cache.data()[0], std::byte{0});
}

TEST(SwapBlocks, CopiesBetweenPoolsOfDifferentSize) {
  const std::vector<std::int32_t> src = numbered(3 * 4);
  std::vector<std::int32_t> dst(6 * 4, -1);
  swap_blocks({reinterpret_cast<const std::byte*>(src.data()), 3},
              {reinterpret_cast<std::byte*>(dst.data()), 6}, 16, mapping_of({2, 5, 0, 2, 2, 0}),
              kFourThreadsRunner);
  EXPECT_EQ(dst, (std::vector<std::int32_t>{8,  9,  10, 11, -1, -1, -1, -1, 0, 1, 2,  3,
                                            -1, -1, -1, -1, -1, -1, -1, -1, 8, 9, 10, 11}));
}

TEST(SwapBlocks, BadPairsChangeNothing) {
  const std::vector<std::int32_t> src = numbered(3 * 4);
  std::vector<std::int32_t> dst(6 * 4, -1);
  for (const Pairs& pairs : {Pairs{0, 0, 3, 1}, Pairs{0, 0, 1, 6}, Pairs{0, 0, -1, 1},
                             Pairs{0, 0, 1, -1}, Pairs{0, 0, 1, 0}}) {
    EXPECT_THROW(swap_blocks({reinterpret_cast<const std::byte*>(src.data()), 3},
                             {reinterpret_cast<std::byte*>(dst.data()), 6}, 16, mapping_of(pairs),
                             kSerialRunner),
                 std::invalid_argument);
    EXPECT_EQ(dst, std::vector<std::int32_t>(6 * 4, -1));
  }
}

}  // namespace
}  // namespace paged_kv::cpu
