// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/block_tables.h"

#include <cstdint>
#include <stdexcept>
#include <vector>

#include <gtest/gtest.h>

namespace paged_kv::cpu {
namespace {

using Ids = std::vector<std::int32_t>;

VectorView<const std::int32_t> view(const Ids& ids) {
  return {ids.data(), static_cast<std::int64_t>(ids.size()), 1};
}

// A table of 3 rows and 4 columns, filled with 90.
struct ApplyCase {
  Ids table = Ids(12, 90);

  void apply(const Ids& rows, const Ids& starts, const Ids& cu_lens, const Ids& contents) {
    apply_block_table_writes({.table = {table.data(), 3, 4, 4, 1},
                              .rows = view(rows),
                              .starts = view(starts),
                              .cu_lens = view(cu_lens),
                              .contents = view(contents)});
  }
};

TEST(ApplyBlockTableWrites, WritesEachDiffAtItsPlace) {
  ApplyCase c;
  c.apply({2, 0, 1}, {1, 0, 4}, {2, 5, 5}, {1, 2, 3, 4, 5});
  EXPECT_EQ(c.table, (Ids{3, 4, 5, 90, 90, 90, 90, 90, 90, 1, 2, 90}));
}

TEST(ApplyBlockTableWrites, LaterWriteToTheSamePlaceWins) {
  ApplyCase c;
  c.apply({1, 1}, {0, 1}, {3, 5}, {1, 2, 3, 8, 9});
  EXPECT_EQ(c.table, (Ids{90, 90, 90, 90, 1, 8, 9, 90, 90, 90, 90, 90}));
}

TEST(ApplyBlockTableWrites, BadDiffsChangeNothing) {
  ApplyCase c;
  EXPECT_THROW(c.apply({0, 3}, {0, 0}, {1, 2}, {1, 2}), std::invalid_argument);   // row
  EXPECT_THROW(c.apply({0, -1}, {0, 0}, {1, 2}, {1, 2}), std::invalid_argument);  // row
  EXPECT_THROW(c.apply({0, 1}, {0, 3}, {1, 3}, {1, 2, 3}),
               std::invalid_argument);                                            // past the width
  EXPECT_THROW(c.apply({0, 1}, {0, -1}, {1, 2}, {1, 2}), std::invalid_argument);  // negative start
  EXPECT_THROW(c.apply({0, 1}, {0, 0}, {2, 1}, {1, 2}), std::invalid_argument);   // decreasing
  EXPECT_THROW(c.apply({0, 1}, {0, 0}, {1, 3}, {1, 2}), std::invalid_argument);  // too few contents
  EXPECT_THROW(c.apply({0}, {0}, {-1}, {}), std::invalid_argument);              // negative length
  EXPECT_EQ(c.table, Ids(12, 90));
}

// Table rows [11 12 13 14], [21 22 23 24], [31 32 33 34]; `out` has 4 rows filled with 90.
struct GatherCase {
  Ids table{11, 12, 13, 14, 21, 22, 23, 24, 31, 32, 33, 34};
  Ids out = Ids(16, 90);

  void gather(const Ids& idx_mapping, const Ids& num_blocks, std::int64_t out_cols = 4) {
    gather_block_tables({.table = {table.data(), 3, 4, 4, 1},
                         .idx_mapping = view(idx_mapping),
                         .num_blocks = view(num_blocks),
                         .out = {out.data(), 4, out_cols, 4, 1}});
  }
};

TEST(GatherBlockTables, CopiesValidEntriesAndZeroesPaddingRows) {
  GatherCase c;
  c.gather({2, -1, 0}, {1, 0, 3});
  EXPECT_EQ(c.out, (Ids{31, 32, 33, 90, 0, 0, 0, 0, 11, 90, 90, 90, 0, 0, 0, 0}));
}

TEST(GatherBlockTables, BadIndicesChangeNothing) {
  GatherCase c;
  EXPECT_THROW(c.gather({0, 3}, {1, 1, 1}), std::invalid_argument);           // row
  EXPECT_THROW(c.gather({0, -2}, {1, 1, 1}), std::invalid_argument);          // row
  EXPECT_THROW(c.gather({0, 1}, {1, 5, 1}), std::invalid_argument);           // past the table
  EXPECT_THROW(c.gather({0, 1}, {1, -1, 1}), std::invalid_argument);          // negative count
  EXPECT_THROW(c.gather({0, 1}, {1, 4, 1}, 3), std::invalid_argument);        // past out's width
  EXPECT_THROW(c.gather({0, 1, 2, 0, 1}, {1, 1, 1}), std::invalid_argument);  // too few out rows
  EXPECT_EQ(c.out, Ids(16, 90));
}

}  // namespace
}  // namespace paged_kv::cpu
