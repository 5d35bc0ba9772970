// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/slot_mapping.h"

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

#include <gtest/gtest.h>

namespace paged_kv {
namespace {

constexpr std::int32_t kAbsurd = std::numeric_limits<std::int32_t>::max();

struct Case {
  std::vector<std::int32_t> query_start_loc;
  std::vector<std::int64_t> positions{};
  std::vector<std::int32_t> block_tables{};  // two columns
  std::vector<std::int32_t> idx_mapping{};   // empty: none
  std::int64_t block_size = 16;
  std::vector<std::int64_t> slots = std::vector<std::int64_t>(6, 77);

  void run() {
    const auto num_seqs = static_cast<std::int64_t>(query_start_loc.size()) - 1;
    compute_slot_mapping(
        {.query_start_loc = {query_start_loc.data(), num_seqs + 1, 1},
         .positions = {positions.data(), static_cast<std::int64_t>(positions.size()), 1},
         .block_tables = {block_tables.data(), static_cast<std::int64_t>(block_tables.size()) / 2,
                          2, 2, 1},
         .idx_mapping = {idx_mapping.empty() ? nullptr : idx_mapping.data(), num_seqs, 1},
         .slot_mapping = {slots.data(), static_cast<std::int64_t>(slots.size()), 1},
         .block_size = block_size});
  }
};

// A request of 25 tokens on blocks 3 and 7 with block size 16: position 18 is 2 into block 7.
TEST(SlotMapping, WorkedExample) {
  Case c{.query_start_loc = {0, 4}, .positions = {0, 15, 16, 18}, .block_tables = {3, 7}};
  c.run();
  EXPECT_EQ(c.slots, (std::vector<std::int64_t>{48, 63, 112, 7 * 16 + 2, -1, -1}));
}

TEST(SlotMapping, RowsComeFromIdxMappingAndPaddingRowsGetNoSlot) {
  Case c{.query_start_loc = {0, 2, 4, 5},
         .positions = {1, 2, -5, 1 << 30, 17},
         .block_tables = {1, kAbsurd, kAbsurd, 4, 2, -1},
         .idx_mapping = {2, -1, 1}};
  c.run();
  EXPECT_EQ(c.slots, (std::vector<std::int64_t>{33, 34, -1, -1, 65, -1}));
}

TEST(SlotMapping, NoSequencesPadsEverything) {
  Case c{.query_start_loc = {0}};
  c.run();
  EXPECT_EQ(c.slots, std::vector<std::int64_t>(6, -1));
}

TEST(SlotMapping, SlotsAre64Bit) {
  Case c{.query_start_loc = {0, 1}, .positions = {3}, .block_tables = {kAbsurd, 0}};
  c.run();
  EXPECT_EQ(c.slots[0], std::int64_t{kAbsurd} * 16 + 3);
}

TEST(SlotMapping, BadInputWritesNothing) {
  const std::vector<Case> cases{
      {.query_start_loc = {1, 2}, .positions = {0, 0}, .block_tables = {3, 7}},
      {.query_start_loc = {0, 2, 1}, .positions = {0, 0}, .block_tables = {3, 7, 4, 5}},
      {.query_start_loc = {0, 2}, .positions = {0}, .block_tables = {3, 7}},
      {.query_start_loc = {0, 7}, .positions = {0, 0, 0, 0, 0, 0, 0}, .block_tables = {3, 7}},
      {.query_start_loc = {0, 2}, .positions = {0, 32}, .block_tables = {3, 7}},
      {.query_start_loc = {0, 2}, .positions = {0, -1}, .block_tables = {3, 7}},
      {.query_start_loc = {0, 2}, .positions = {0, 16}, .block_tables = {3, -1}},
      {.query_start_loc = {0, 1, 2}, .positions = {0, 0}, .block_tables = {3, 7}},
      {.query_start_loc = {0, 2}, .positions = {0, 1}, .block_tables = {3, 7}, .idx_mapping = {1}},
      {.query_start_loc = {0, 2}, .positions = {0, 1}, .block_tables = {3, 7}, .idx_mapping = {-2}},
      {.query_start_loc = {0, 2}, .positions = {0, 1}, .block_tables = {3, 7}, .block_size = 0},
  };
  for (Case c : cases) {
    EXPECT_THROW(c.run(), std::invalid_argument);
    EXPECT_EQ(c.slots, std::vector<std::int64_t>(6, 77));
  }
}

}  // namespace
}  // namespace paged_kv
