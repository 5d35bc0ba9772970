// SPDX-License-Identifier: Apache-2.0
#include "huge_mapping.h"
#include "ops/cpu/gather_cache.h"
#include "ops/cpu/reshape_and_cache.h"
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

static_assert(panel_x(FloatDtype::kBFloat16, KvCacheDtype::kAuto) == 2);
static_assert(panel_x(FloatDtype::kBFloat16, KvCacheDtype::kInt8) == 1);
static_assert(panel_x(FloatDtype::kHalf, KvCacheDtype::kAuto) == 1);
static_assert(panel_x(FloatDtype::kFloat, KvCacheDtype::kAuto) == 1);

// Token 18, dim 37 of a head of 48 dims: group 1, lane 2.
static_assert(key_panel_element(18, 37, 48, 1) == 16 * 48 + 37 * 16 + 2);
static_assert(key_panel_element(18, 37, 48, 2) == 16 * 48 + 18 * 32 + 2 * 2 + 1);
static_assert(value_panel_element(18, 37, 48, 1) == 16 * 48 + 2 * 256 + 2 * 16 + 5);
static_assert(value_panel_element(19, 37, 48, 2) == 16 * 48 + 2 * 256 + 1 * 32 + 5 * 2 + 1);

// One layer whose elements are the integers T, which is not converted. Element (token, head, dim)
// of the keys is 1 + its index; that of the values has the highest bit besides.
template <class T>
struct Case {
  static constexpr T kUntouched = static_cast<T>(~T{0});
  static constexpr T kHighestBit = static_cast<T>(T{1} << (8 * sizeof(T) - 1));

  FloatDtype dtype;
  std::int64_t head_size;
  std::int64_t num_blocks = 3;
  std::int64_t block_size = 32;
  std::int64_t num_kv_heads = 2;
  std::vector<std::int64_t> slots;
  std::vector<T> key;
  std::vector<T> value;
  std::vector<T> key_cache;
  std::vector<T> value_cache;

  Case(FloatDtype type, std::int64_t dims, std::vector<std::int64_t> slot_mapping)
      : dtype(type), head_size(dims), slots(std::move(slot_mapping)) {
    const auto row = static_cast<std::size_t>(num_kv_heads * head_size);
    key.resize(slots.size() * row);
    std::iota(key.begin(), key.end(), T{1});
    for (const T element : key) value.push_back(static_cast<T>(element | kHighestBit));
    key_cache.assign(static_cast<std::size_t>(num_blocks * block_size) * row, kUntouched);
    value_cache = key_cache;
  }

  [[nodiscard]] std::int64_t head_stride() const { return block_size * head_size; }
  [[nodiscard]] std::int64_t block_stride() const { return num_kv_heads * head_stride(); }
  [[nodiscard]] std::int64_t row() const { return num_kv_heads * head_size; }

  void write(const ThreadRunner& runner) { write(key.data(), value.data(), runner); }

  void write(const T* keys, const T* values, const ThreadRunner& runner) {
    reshape_and_cache_panels(
        {.key = {keys, row(), {head_size, 1}},
         .value = {values, row(), {head_size, 1}},
         .key_cache = {key_cache.data(), block_stride(), head_stride()},
         .value_cache = {value_cache.data(), block_stride(), head_stride()},
         .slot_mapping = {slots.data(), static_cast<std::int64_t>(slots.size()), 1},
         .num_blocks = num_blocks,
         .block_size = block_size,
         .num_kv_heads = num_kv_heads,
         .head_size = head_size,
         .element_size = sizeof(T),
         .dtype = dtype},
        runner);
  }

  void expect_written() const {
    std::vector<T> keys(key_cache.size(), kUntouched);
    std::vector<T> values = keys;
    const std::int64_t x = panel_x(dtype, KvCacheDtype::kAuto);
    for (std::size_t token = 0; token < slots.size(); ++token) {
      if (slots[token] < 0) continue;
      const std::int64_t offset = slots[token] % block_size;
      for (std::int64_t head = 0; head < num_kv_heads; ++head) {
        const std::int64_t first =
            slots[token] / block_size * block_stride() + head * head_stride();
        for (std::int64_t dim = 0; dim < head_size; ++dim) {
          const auto src = token * static_cast<std::size_t>(row()) +
                           static_cast<std::size_t>(head * head_size + dim);
          keys[static_cast<std::size_t>(first + key_panel_element(offset, dim, head_size, x))] =
              key[src];
          values[static_cast<std::size_t>(first + value_panel_element(offset, dim, head_size, x))] =
              value[src];
        }
      }
    }
    EXPECT_EQ(key_cache, keys);
    EXPECT_EQ(value_cache, values);
  }

  // Block 1, then block 2, from `start` on.
  [[nodiscard]] std::vector<T> gathered(CachePanels panels, std::int32_t start) const {
    const std::vector<std::int32_t> table{1, 2};
    const std::vector<std::int32_t> cu_seq_lens{0, 64 - start};
    std::vector<T> out(static_cast<std::size_t>((64 - start) * row()));
    gather_cache({.cache = (panels == CachePanels::kKeys ? key_cache : value_cache).data(),
                  .out = out.data(),
                  .block_tables = {table.data(), 1, 2, 2, 1},
                  .cu_seq_lens = {cu_seq_lens.data(), 2, 1},
                  .seq_starts = {&start, 1, 1},
                  .num_blocks = num_blocks,
                  .block_size = block_size,
                  .num_kv_heads = num_kv_heads,
                  .head_size = head_size,
                  .block_stride = block_stride(),
                  .offset_stride = 0,
                  .cache_strides = {head_stride(), 0},
                  .num_out_tokens = 64 - start,
                  .out_token_stride = row(),
                  .out_strides = {head_size, 1},
                  .element_size = sizeof(T),
                  .dtype = dtype,
                  .panels = panels},
                 kFourThreadsRunner);
    return out;
  }
};

// Calls f(Case) for each order of elements, and for heads of one tile of dims and of more.
template <class F>
void for_each_case(const std::vector<std::int64_t>& slots, F&& f) {
  for (const std::int64_t head_size : {16, 80, 144}) {
    f(Case<std::uint32_t>(FloatDtype::kFloat, head_size, slots));
    f(Case<std::uint16_t>(FloatDtype::kHalf, head_size, slots));
    f(Case<std::uint16_t>(FloatDtype::kBFloat16, head_size, slots));
  }
}

// Runs over the border of a group and of a block; both tokens of a pair, one of them, each in a run
// of its own; padding; descending slots; the last slot of the cache.
const std::vector<std::int64_t> kSlots = {13, 14, 15, 16, 17, -1, 30, 31, 32, 33, 34,
                                          35, 36, 37, 40, 43, 42, 41, 50, -9, 95};

TEST(ReshapeAndCachePanels, WritesEachTokenToItsSlotAndNothingElse) {
  for (const ThreadRunner& runner : {kSerialRunner, kBackwardsRunner, kFourThreadsRunner}) {
    for_each_case(kSlots, [&](auto c) {
      c.write(runner);
      c.expect_written();
    });
  }
}

TEST(ReshapeAndCachePanels, WritesWholeBlocks) {
  std::vector<std::int64_t> slots(64);
  std::iota(slots.begin(), slots.end(), std::int64_t{32});
  for (const ThreadRunner& runner : {kSerialRunner, kFourThreadsRunner}) {
    for_each_case(slots, [&](auto c) {
      c.write(runner);
      c.expect_written();
    });
  }
}

TEST(ReshapeAndCachePanels, GatherReadsThemBack) {
  std::vector<std::int64_t> slots(64);
  std::iota(slots.begin(), slots.end(), std::int64_t{32});
  for_each_case(slots, [&](auto c) {
    c.write(kSerialRunner);
    EXPECT_EQ(c.gathered(CachePanels::kKeys, 0), c.key);
    EXPECT_EQ(c.gathered(CachePanels::kValues, 0), c.value);
    c.key.erase(c.key.begin(), c.key.begin() + 21 * c.row());
    EXPECT_EQ(c.gathered(CachePanels::kKeys, 21), c.key);
  });
}

TEST(ReshapeAndCachePanels, ReadsNothingOfPaddedTokens) {
  for_each_case({-1, 3, -1}, [](auto c) {
    // Under ASan, reading the first or the last token leaves these allocations.
    auto one_key = c.key;
    one_key.erase(one_key.begin() + 2 * c.row(), one_key.end());
    one_key.erase(one_key.begin(), one_key.begin() + c.row());
    one_key.shrink_to_fit();
    auto one_value = c.value;
    one_value.erase(one_value.begin() + 2 * c.row(), one_value.end());
    one_value.erase(one_value.begin(), one_value.begin() + c.row());
    one_value.shrink_to_fit();
    c.write(one_key.data() - c.row(), one_value.data() - c.row(), kSerialRunner);
    c.expect_written();
  });
}

TEST(ReshapeAndCachePanels, SlotPastTheEndIsRefusedBeforeAnythingIsWritten) {
  for_each_case({0, 1, 96}, [](auto c) {
    const auto before = c.key_cache;
    EXPECT_THROW(c.write(kSerialRunner), std::invalid_argument);
    EXPECT_EQ(c.key_cache, before);
    EXPECT_EQ(c.value_cache, before);
  });
}

// Block 1 of a cache whose block stride is beyond 2^31 elements and 2^32 bytes.
TEST(ReshapeAndCachePanels, OffsetsAre64Bit) {
  constexpr std::int64_t kStride = (std::int64_t{1} << 31) + 64;
  HugeMapping<std::uint16_t> keys(2 * kStride);
  HugeMapping<std::uint16_t> values(2 * kStride);
  std::vector<std::uint16_t> token(16);
  std::iota(token.begin(), token.end(), std::uint16_t{1});
  const std::int64_t slot = 16 + 5;
  const NewTokens tokens{token.data(), 16, {16, 1}};
  reshape_and_cache_panels({.key = tokens,
                            .value = tokens,
                            .key_cache = {keys.data(), kStride, 256},
                            .value_cache = {values.data(), kStride, 256},
                            .slot_mapping = {&slot, 1, 1},
                            .num_blocks = 2,
                            .block_size = 16,
                            .num_kv_heads = 1,
                            .head_size = 16,
                            .element_size = 2,
                            .dtype = FloatDtype::kBFloat16},
                           kSerialRunner);
  EXPECT_EQ(keys.data()[kStride + 7 * 32 + 5 * 2 + 1], 16);
  EXPECT_EQ(values.data()[kStride + 2 * 32 + 15 * 2 + 1], 16);
}

}  // namespace
}  // namespace paged_kv::cpu
