// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/reshape_and_cache.h"

#include "huge_mapping.h"
#include "test_threads.h"

#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <vector>

#include <gtest/gtest.h>

namespace paged_kv::cpu {
namespace {

using testing::HugeMapping;
using testing::kBackwardsRunner;
using testing::kFourThreadsRunner;

constexpr std::uint16_t kUntouched = 0xFFFF;
constexpr std::int64_t kX = 8;  // 16 bytes of 2-byte elements

// One layer with 2-byte elements. Element (token, head, dim) of the keys is 1 + its index; that of
// the values 20001 + it.
struct Case {
  std::int64_t num_blocks = 4;
  std::int64_t block_size = 16;
  std::int64_t num_kv_heads = 2;
  std::int64_t head_size = 16;
  std::vector<std::int64_t> slots;
  std::vector<std::uint16_t> key;
  std::vector<std::uint16_t> value;
  std::vector<std::uint16_t> key_cache;
  std::vector<std::uint16_t> value_cache;

  explicit Case(std::vector<std::int64_t> slot_mapping) : slots(std::move(slot_mapping)) {
    const auto row = static_cast<std::size_t>(num_kv_heads * head_size);
    key.resize(slots.size() * row);
    std::iota(key.begin(), key.end(), std::uint16_t{1});
    value.resize(key.size());
    std::iota(value.begin(), value.end(), std::uint16_t{20001});
    key_cache.assign(static_cast<std::size_t>(num_blocks * block_size) * row, kUntouched);
    value_cache = key_cache;
  }

  [[nodiscard]] NewTokens tokens(const std::vector<std::uint16_t>& data) const {
    return {data.data(), num_kv_heads * head_size, {head_size, 1}};
  }
  [[nodiscard]] VectorView<const std::int64_t> slot_view() const {
    return {slots.data(), static_cast<std::int64_t>(slots.size()), 1};
  }

  void write_packed(const ThreadRunner& runner) {
    const std::int64_t block = num_kv_heads * head_size * block_size;
    const std::int64_t head = head_size * block_size;
    reshape_and_cache({.key = tokens(key),
                       .value = tokens(value),
                       .key_cache = {key_cache.data(), block, head, block_size * kX, kX, 1},
                       .value_cache = {value_cache.data(), block, head, block_size, 1},
                       .slot_mapping = slot_view(),
                       .num_blocks = num_blocks,
                       .block_size = block_size,
                       .num_kv_heads = num_kv_heads,
                       .head_size = head_size,
                       .x = kX,
                       .element_size = 2},
                      runner);
  }

  void write_flash(bool hnd, const ThreadRunner& runner) {
    const std::int64_t block = num_kv_heads * head_size * block_size;
    const std::int64_t offset = hnd ? head_size : num_kv_heads * head_size;
    const std::int64_t head = hnd ? head_size * block_size : head_size;
    reshape_and_cache_flash({.key = tokens(key),
                             .value = tokens(value),
                             .key_cache = {key_cache.data(), block, offset, {head, 1}},
                             .value_cache = {value_cache.data(), block, offset, {head, 1}},
                             .slot_mapping = slot_view(),
                             .num_blocks = num_blocks,
                             .block_size = block_size,
                             .num_kv_heads = num_kv_heads,
                             .head_size = head_size,
                             .element_size = 2},
                            runner);
  }

  // Calls f(index into key/value, block, offset, head, dim) for every element that is written.
  template <class F>
  void for_each_written(F&& f) const {
    for (std::size_t token = 0; token < slots.size(); ++token) {
      if (slots[token] < 0) {
        continue;
      }
      for (std::int64_t head = 0; head < num_kv_heads; ++head) {
        for (std::int64_t dim = 0; dim < head_size; ++dim) {
          const auto src = token * static_cast<std::size_t>(num_kv_heads * head_size) +
                           static_cast<std::size_t>(head * head_size + dim);
          f(src, slots[token] / block_size, slots[token] % block_size, head, dim);
        }
      }
    }
  }

  void expect_packed() const {
    std::vector<std::uint16_t> keys(key_cache.size(), kUntouched);
    std::vector<std::uint16_t> values = keys;
    for_each_written([&](std::size_t src, std::int64_t block, std::int64_t offset,
                         std::int64_t head, std::int64_t dim) {
      const std::int64_t base = (block * num_kv_heads + head) * head_size * block_size;
      keys[static_cast<std::size_t>(base + (dim / kX * block_size + offset) * kX + dim % kX)] =
          key[src];
      values[static_cast<std::size_t>(base + dim * block_size + offset)] = value[src];
    });
    EXPECT_EQ(key_cache, keys);
    EXPECT_EQ(value_cache, values);
  }

  void expect_flash(bool hnd) const {
    std::vector<std::uint16_t> keys(key_cache.size(), kUntouched);
    std::vector<std::uint16_t> values = keys;
    for_each_written([&](std::size_t src, std::int64_t block, std::int64_t offset,
                         std::int64_t head, std::int64_t dim) {
      const std::int64_t row = hnd ? (block * num_kv_heads + head) * block_size + offset
                                   : (block * block_size + offset) * num_kv_heads + head;
      keys[static_cast<std::size_t>(row * head_size + dim)] = key[src];
      values[static_cast<std::size_t>(row * head_size + dim)] = value[src];
    });
    EXPECT_EQ(key_cache, keys);
    EXPECT_EQ(value_cache, values);
  }
};

// A run over a block border, a lone slot, padding, descending slots, the last slot of the cache.
const std::vector<std::int64_t> kSlots = {14, 15, 16, 17, 18, -1, 40, 34, 33, 32, -1, 63};

TEST(ReshapeAndCache, WritesEachTokenToItsSlotAndNothingElse) {
  for (const ThreadRunner& runner : {kSerialRunner, kBackwardsRunner, kFourThreadsRunner}) {
    Case c(kSlots);
    c.write_packed(runner);
    c.expect_packed();
  }
}

TEST(ReshapeAndCacheFlash, WritesEachTokenToItsSlotAndNothingElse) {
  for (const bool hnd : {false, true}) {
    for (const ThreadRunner& runner : {kSerialRunner, kBackwardsRunner, kFourThreadsRunner}) {
      Case c(kSlots);
      c.write_flash(hnd, runner);
      c.expect_flash(hnd);
    }
  }
}

TEST(ReshapeAndCache, ReadsNothingOfPaddedTokens) {
  Case c({-1, 3, -1});
  // Under ASan, reading the first or the last token leaves this allocation.
  const std::int64_t row = c.num_kv_heads * c.head_size;
  std::vector<std::uint16_t> one_token(c.key.begin() + row, c.key.begin() + 2 * row);
  const NewTokens only_second{one_token.data() - row, row, {c.head_size, 1}};
  reshape_and_cache_flash(
      {.key = only_second,
       .value = only_second,
       .key_cache = {c.key_cache.data(), c.block_size * row, row, {c.head_size, 1}},
       .value_cache = {c.value_cache.data(), c.block_size * row, row, {c.head_size, 1}},
       .slot_mapping = c.slot_view(),
       .num_blocks = c.num_blocks,
       .block_size = c.block_size,
       .num_kv_heads = c.num_kv_heads,
       .head_size = c.head_size,
       .element_size = 2},
      kSerialRunner);
  EXPECT_EQ(c.key_cache[static_cast<std::size_t>(3 * row)], one_token[0]);
}

TEST(ReshapeAndCache, SlotPastTheEndIsRefusedBeforeAnythingIsWritten) {
  Case c({0, 1, 64});
  EXPECT_THROW(c.write_packed(kSerialRunner), std::invalid_argument);
  EXPECT_THROW(c.write_flash(false, kSerialRunner), std::invalid_argument);
  EXPECT_EQ(c.key_cache, std::vector<std::uint16_t>(c.key_cache.size(), kUntouched));
  EXPECT_EQ(c.value_cache, std::vector<std::uint16_t>(c.value_cache.size(), kUntouched));
}

TEST(ReshapeAndCache, NoTokensIsNoWork) {
  Case c({});
  c.write_packed(kSerialRunner);
  c.write_flash(true, kSerialRunner);
  EXPECT_EQ(c.key_cache, std::vector<std::uint16_t>(c.key_cache.size(), kUntouched));
}

// Block 1 of a cache whose block stride is beyond 2^31 elements and 2^32 bytes.
TEST(ReshapeAndCache, OffsetsAre64Bit) {
  constexpr std::int64_t kStride = (std::int64_t{1} << 31) + 64;
  HugeMapping<std::uint16_t> keys(2 * kStride);
  HugeMapping<std::uint16_t> values(2 * kStride);
  std::vector<std::uint16_t> token(16);
  std::iota(token.begin(), token.end(), std::uint16_t{1});
  const std::int64_t slot = 16 + 5;
  const NewTokens tokens{token.data(), 16, {16, 1}};

  reshape_and_cache_flash({.key = tokens,
                           .value = tokens,
                           .key_cache = {keys.data(), kStride, 16, {16, 1}},
                           .value_cache = {values.data(), kStride, 16, {16, 1}},
                           .slot_mapping = {&slot, 1, 1},
                           .num_blocks = 2,
                           .block_size = 16,
                           .num_kv_heads = 1,
                           .head_size = 16,
                           .element_size = 2},
                          kSerialRunner);
  EXPECT_EQ(keys.data()[kStride + 5 * 16], 1);
  EXPECT_EQ(values.data()[kStride + 5 * 16 + 15], 16);

  reshape_and_cache({.key = tokens,
                     .value = tokens,
                     .key_cache = {keys.data(), kStride, 256, 16 * kX, kX, 1},
                     .value_cache = {values.data(), kStride, 256, 16, 1},
                     .slot_mapping = {&slot, 1, 1},
                     .num_blocks = 2,
                     .block_size = 16,
                     .num_kv_heads = 1,
                     .head_size = 16,
                     .x = kX,
                     .element_size = 2},
                    kSerialRunner);
  EXPECT_EQ(keys.data()[kStride + (1 * 16 + 5) * kX], 9);  // dim 8: chunk 1, lane 0
  EXPECT_EQ(values.data()[kStride + 15 * 16 + 5], 16);     // dim 15
}

}  // namespace
}  // namespace paged_kv::cpu
