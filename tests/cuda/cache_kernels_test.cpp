// SPDX-License-Identifier: Apache-2.0
//
// The cache kernels under every schedule, and in builds with sanitizers. What they compute is
// tested from Python (tests/ops), with one list of cases for all backends.
#include "paged_kv/cuda/block_copy.h"
#include "paged_kv/cuda/gather_cache.h"
#include "paged_kv/cuda/reshape_and_cache.h"
#include "test_support.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <vector>

#include <gtest/gtest.h>

namespace paged_kv::cuda::testing {
namespace {

constexpr std::int64_t kNumBlocks = 3;
constexpr std::int64_t kBlockSize = 16;
constexpr std::int64_t kNumKvHeads = 2;
constexpr std::int64_t kHeadSize = 16;
constexpr std::int64_t kRow = kNumKvHeads * kHeadSize;
constexpr std::int64_t kCacheSize = kNumBlocks * kBlockSize * kRow;
constexpr std::uint16_t kUntouched = 0x7fff;
constexpr float kScale = 0.5f;

// A run from the middle of a block over its end, padding, a slot past the end, single slots.
const std::vector<std::int64_t> kSlots = {5,  6,  7,  8,  9,  10, 11, 12, 13, 14,
                                          15, 16, 17, -1, 47, 48, 30, 29, 2};

VectorView<const std::int64_t> slots_view() {
  return {kSlots.data(), static_cast<std::int64_t>(kSlots.size()), 1};
}

// Halves: every element its own bits, small enough to be finite.
std::vector<std::uint16_t> numbered_tokens() {
  std::vector<std::uint16_t> tokens(kSlots.size() * static_cast<std::size_t>(kRow));
  std::iota(tokens.begin(), tokens.end(), std::uint16_t{0x3000});
  return tokens;
}

NewTokens tokens_view(const std::vector<std::uint16_t>& tokens) {
  return {.data = tokens.data(), .token_stride = kRow, .strides = {.head = kHeadSize, .dim = 1}};
}

// Key cache, then value cache, with a guard of one row before, between and behind them.
template <class T>
struct Caches {
  std::vector<T> memory = std::vector<T>(2 * kCacheSize + 3 * kRow, static_cast<T>(kUntouched));

  [[nodiscard]] T* key() { return memory.data() + kRow; }
  [[nodiscard]] T* value() { return memory.data() + 2 * kRow + kCacheSize; }
  [[nodiscard]] bool has_guards() const {
    const auto is_guard = [&](std::int64_t first) {
      for (std::int64_t i = first; i < first + kRow; ++i) {
        if (memory[static_cast<std::size_t>(i)] != static_cast<T>(kUntouched)) return false;
      }
      return true;
    };
    return is_guard(0) && is_guard(kRow + kCacheSize) && is_guard(2 * kRow + 2 * kCacheSize);
  }
};

template <class T>
std::vector<T> write_flash(KvCacheDtype kv_cache_dtype) {
  const std::vector<std::uint16_t> tokens = numbered_tokens();
  Caches<T> caches;
  const auto cache = [](T* data) {  // hnd
    return FlashCache{.data = data,
                      .block_stride = kBlockSize * kRow,
                      .offset_stride = kHeadSize,
                      .strides = {.head = kBlockSize * kHeadSize, .dim = 1}};
  };
  reshape_and_cache_flash({.key = tokens_view(tokens),
                           .value = tokens_view(tokens),
                           .key_cache = cache(caches.key()),
                           .value_cache = cache(caches.value()),
                           .slot_mapping = slots_view(),
                           .num_blocks = kNumBlocks,
                           .block_size = kBlockSize,
                           .num_kv_heads = kNumKvHeads,
                           .head_size = kHeadSize,
                           .element_size = 2,
                           .dtype = FloatDtype::kHalf,
                           .kv_cache_dtype = kv_cache_dtype,
                           .k_scale = {&kScale, 0},
                           .v_scale = {&kScale, 0}},
                          nullptr);
  EXPECT_TRUE(caches.has_guards());
  return caches.memory;
}

template <class T>
std::vector<T> write_packed(KvCacheDtype kv_cache_dtype) {
  constexpr std::int64_t kX = 16 / sizeof(T);
  const std::vector<std::uint16_t> tokens = numbered_tokens();
  Caches<T> caches;
  reshape_and_cache({.key = tokens_view(tokens),
                     .value = tokens_view(tokens),
                     .key_cache = {.data = caches.key(),
                                   .block_stride = kBlockSize * kRow,
                                   .head_stride = kBlockSize * kHeadSize,
                                   .chunk_stride = kBlockSize * kX,
                                   .offset_stride = kX,
                                   .lane_stride = 1},
                     .value_cache = {.data = caches.value(),
                                     .block_stride = kBlockSize * kRow,
                                     .head_stride = kBlockSize * kHeadSize,
                                     .dim_stride = kBlockSize,
                                     .offset_stride = 1},
                     .slot_mapping = slots_view(),
                     .num_blocks = kNumBlocks,
                     .block_size = kBlockSize,
                     .num_kv_heads = kNumKvHeads,
                     .head_size = kHeadSize,
                     .x = kX,
                     .element_size = 2,
                     .dtype = FloatDtype::kHalf,
                     .kv_cache_dtype = kv_cache_dtype,
                     .k_scale = {&kScale, 0},
                     .v_scale = {&kScale, 0}},
                    nullptr);
  EXPECT_TRUE(caches.has_guards());
  return caches.memory;
}

template <class F>
void expect_the_same_in_every_order(F run) {
  const auto results = results_by_schedule(run);
  for (const auto& result : results) EXPECT_EQ(result, results[0]);
}

TEST(ReshapeAndCacheFlashKernel, IsTheSameInEveryOrder) {
  expect_the_same_in_every_order([] { return write_flash<std::uint16_t>(KvCacheDtype::kAuto); });
  expect_the_same_in_every_order(
      [] { return write_flash<std::uint8_t>(KvCacheDtype::kFloat8E4M3); });
}

TEST(ReshapeAndCacheKernel, IsTheSameInEveryOrder) {
  expect_the_same_in_every_order([] { return write_packed<std::uint16_t>(KvCacheDtype::kAuto); });
  expect_the_same_in_every_order(
      [] { return write_packed<std::uint8_t>(KvCacheDtype::kFloat8E5M2); });
}

// Slot by slot: what the packed writer put where.
TEST(ReshapeAndCacheKernel, PutsKeysIntoChunksAndValuesIntoRows) {
  std::vector<std::uint16_t> memory = write_packed<std::uint16_t>(KvCacheDtype::kAuto);
  const std::uint16_t* key_cache = memory.data() + kRow;
  const std::uint16_t* value_cache = memory.data() + 2 * kRow + kCacheSize;
  std::vector<std::int64_t> token_of(kNumBlocks * kBlockSize, -1);
  for (std::size_t token = 0; token < kSlots.size(); ++token) {
    const std::int64_t slot = kSlots[token];
    if (slot >= 0 && slot < kNumBlocks * kBlockSize) {
      token_of[static_cast<std::size_t>(slot)] = static_cast<std::int64_t>(token);
    }
  }
  for (std::int64_t slot = 0; slot < kNumBlocks * kBlockSize; ++slot) {
    const std::int64_t token = token_of[static_cast<std::size_t>(slot)];
    for (std::int64_t i = 0; i < kRow; ++i) {
      const std::int64_t head = i / kHeadSize, dim = i % kHeadSize;
      const std::int64_t block_head = (slot / kBlockSize * kNumKvHeads + head) * kHeadSize;
      const std::int64_t offset = slot % kBlockSize;
      const int expected = token < 0 ? kUntouched : static_cast<int>(0x3000 + token * kRow + i);
      EXPECT_EQ(key_cache[(block_head + dim / 8 * 8) * kBlockSize + offset * 8 + dim % 8],
                expected);
      EXPECT_EQ(value_cache[(block_head + dim) * kBlockSize + offset], expected);
    }
  }
}

std::vector<std::uint16_t> gather(KvCacheDtype kv_cache_dtype) {
  std::vector<std::uint16_t> cache(kCacheSize);
  std::iota(cache.begin(), cache.end(), std::uint16_t{0x3000});
  const std::vector<std::int32_t> tables = {2, 9, 0, 1};
  const std::vector<std::int32_t> cu_seq_lens = {0, 7, 7 + 20};
  const std::vector<std::int32_t> seq_starts = {3, 8};
  std::vector<std::uint16_t> out(30 * kRow, kUntouched);
  gather_cache({.cache = cache.data(),
                .out = out.data(),
                .block_tables = {tables.data(), 2, 2, 2, 1},
                .cu_seq_lens = {cu_seq_lens.data(), 3, 1},
                .seq_starts = {seq_starts.data(), 2, 1},
                .num_blocks = kNumBlocks,
                .block_size = kBlockSize,
                .num_kv_heads = kNumKvHeads,
                .head_size = kHeadSize,
                .block_stride = kBlockSize * kRow,
                .offset_stride = kRow,
                .cache_strides = {.head = kHeadSize, .dim = 1},
                .num_out_tokens = 30,
                .out_token_stride = kRow,
                .out_strides = {.head = kHeadSize, .dim = 1},
                .element_size = 2,
                .dtype = FloatDtype::kHalf,
                .kv_cache_dtype = kv_cache_dtype,
                .scale = {&kScale, 0}},
               nullptr);
  return out;
}

TEST(GatherCacheKernel, IsTheSameInEveryOrder) {
  expect_the_same_in_every_order([] { return gather(KvCacheDtype::kAuto); });
  expect_the_same_in_every_order([] { return gather(KvCacheDtype::kFloat8E4M3); });
}

TEST(GatherCacheKernel, ReadsThroughTheTable) {
  const std::vector<std::uint16_t> out = gather(KvCacheDtype::kAuto);
  const auto first_of = [&](std::int64_t row) { return out[static_cast<std::size_t>(row * kRow)]; };
  const auto in_cache = [](std::int64_t block, std::int64_t offset) {
    return static_cast<std::uint16_t>(0x3000 + (block * kBlockSize + offset) * kRow);
  };
  EXPECT_EQ(first_of(0), in_cache(2, 3));
  EXPECT_EQ(first_of(6), in_cache(2, 9));
  EXPECT_EQ(first_of(7), in_cache(0, 8));
  EXPECT_EQ(first_of(26), in_cache(1, 11));
  EXPECT_EQ(first_of(27), kUntouched);
}

BlockedCache cache_of(std::vector<std::uint8_t>& memory, std::int64_t num_blocks,
                      std::int64_t block_bytes) {
  return {reinterpret_cast<std::byte*>(memory.data()), num_blocks, block_bytes,
          BlockShape(std::array{block_bytes}, std::array{std::int64_t{1}}, 1)};
}

TEST(CopyBlocksKernel, IsTheSameInEveryOrder) {
  expect_the_same_in_every_order([] {
    std::vector<std::vector<std::uint8_t>> memory(3, std::vector<std::uint8_t>(4 * 80));
    std::vector<BlockedCache> caches;
    for (auto& bytes : memory) {
      std::iota(bytes.begin(), bytes.end(), std::uint8_t{0});
      caches.push_back(cache_of(bytes, 4, 80));
    }
    const std::vector<std::int64_t> pairs = {0, 3, 1, 2, 9, 1, 1, -1};
    copy_blocks(caches, {pairs.data(), 4, 2, 2, 1}, nullptr);
    return memory;
  });
}

TEST(SwapBlocks, ChecksAllPairsBeforeTheFirstCopy) {
  std::vector<std::byte> src(64, std::byte{1});
  std::vector<std::byte> dst(64, std::byte{2});
  const std::vector<std::int64_t> pairs = {0, 0, 1, 4};
  EXPECT_THROW(
      swap_blocks({src.data(), 4}, {dst.data(), 4}, 16, {pairs.data(), 2, 2, 2, 1}, nullptr),
      std::invalid_argument);
  EXPECT_EQ(dst, std::vector<std::byte>(64, std::byte{2}));
}

TEST(CacheKernels, RefuseMoreSlotsThanTheyCanDivide) {
  ReshapeAndCacheFlashParams params{};
  params.slot_mapping = slots_view();
  params.num_blocks = std::int64_t{1} << 31;
  params.block_size = 2;
  params.num_kv_heads = params.head_size = 1;
  EXPECT_THROW(reshape_and_cache_flash(params, nullptr), std::invalid_argument);
}

}  // namespace
}  // namespace paged_kv::cuda::testing
