// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/block_table.h"

#include "paged_kv/check.h"

#include <stdexcept>
#include <vector>

#include <gtest/gtest.h>

namespace paged_kv {
namespace {

BlockTableOptions options(std::int64_t block_size = 16, std::int64_t kernel_block_size = 16) {
  return {.block_size = block_size,
          .max_num_reqs = 3,
          .max_num_blocks_per_req = 4,
          .max_num_batched_tokens = 6,
          .kernel_block_size = kernel_block_size};
}

std::vector<std::int32_t> row(BlockTable& table, std::int64_t row_idx) {
  const auto entries = table.table().subspan(static_cast<std::size_t>(row_idx * table.width()),
                                             static_cast<std::size_t>(table.width()));
  return {entries.begin(), entries.end()};
}

using Row = std::vector<std::int32_t>;
const std::vector<BlockId> kBlocks{BlockId(3), BlockId(7)};

TEST(BlockTable, ClassicSlotExample) {
  BlockTable table(options());
  table.add_row(kBlocks, 0);
  table.compute_slot_mapping(1, std::vector<std::int32_t>{0, 2}, std::vector<std::int64_t>{0, 18});
  EXPECT_EQ(std::vector(table.slot_mapping().begin(), table.slot_mapping().end()),
            (std::vector<std::int64_t>{3 * 16, 7 * 16 + 2, -1, -1, -1, -1}));
}

TEST(BlockTable, SplitsBlocksForTheKernel) {
  BlockTable table(options(64, 16));
  table.append_row(kBlocks, 1);
  EXPECT_EQ(table.width(), 16);
  const Row expected{12, 13, 14, 15, 28, 29, 30, 31, 0, 0, 0, 0, 0, 0, 0, 0};
  EXPECT_EQ(row(table, 1), expected);
  table.compute_slot_mapping(2, std::vector<std::int32_t>{0, 0, 2},
                             std::vector<std::int64_t>{63, 64});
  EXPECT_EQ(table.slot_mapping()[0], 3 * 64 + 63);
  EXPECT_EQ(table.slot_mapping()[1], 7 * 64);
}

TEST(BlockTable, AFailedCallChangesNothing) {
  BlockTable table(options());
  table.append_row(kBlocks, 0);
  const std::vector<std::int32_t> before(table.table().begin(), table.table().end());
  const auto three = std::vector{BlockId(1), BlockId(2), BlockId(4)};
  const auto five = std::vector(5, BlockId(1));
  const auto bad_id = std::vector{BlockId(1), BlockId(-1)};
  EXPECT_THROW(table.append_row(three, 0), std::invalid_argument);
  EXPECT_THROW(table.add_row(five, 0), std::invalid_argument);
  EXPECT_THROW(table.append_row(bad_id, 0), std::invalid_argument);
  EXPECT_THROW(table.add_row(bad_id, 0), std::invalid_argument);
  EXPECT_THROW(table.append_row(kBlocks, 3), std::out_of_range);
  EXPECT_THROW(table.clear_row(-1), std::out_of_range);
  EXPECT_THROW(table.move_row(0, 3), std::out_of_range);
  EXPECT_THROW(table.swap_row(3, 0), std::out_of_range);
  // Position 32 lies past the row's two blocks; the null block behind them must not be used.
  EXPECT_THROW(table.compute_slot_mapping(1, std::vector<std::int32_t>{0, 2},
                                          std::vector<std::int64_t>{0, 32}),
               std::invalid_argument);
  EXPECT_THROW(table.compute_slot_mapping(1, std::vector<std::int32_t>{0}, {}),
               std::invalid_argument);
  EXPECT_THROW(
      table.compute_slot_mapping(1, std::vector<std::int32_t>{0, 2}, std::vector<std::int64_t>{0}),
      std::invalid_argument);
  EXPECT_EQ(std::vector(table.table().begin(), table.table().end()), before);
  EXPECT_EQ(table.num_blocks_per_row()[0], 2);
  EXPECT_EQ(table.slot_mapping()[0], -1);
}

TEST(BlockTable, CommitCopiesWholeRows) {
  BlockTable table(options());
  table.append_row(kBlocks, 1);
  std::vector<std::int32_t> out(8, 99);
  table.commit_block_table(2, out);
  EXPECT_EQ(out, (Row{0, 0, 0, 0, 3, 7, 0, 0}));
  EXPECT_THROW(table.commit_block_table(3, out), std::invalid_argument);
  EXPECT_THROW(table.commit_block_table(4, out), std::invalid_argument);
}

// rows, starts, cu_lens and entries, as one list.
Row read_dirty(const BlockTable& table, std::int64_t num_reqs) {
  const DirtyBlockTable size = table.dirty(num_reqs);
  Row diff(static_cast<std::size_t>(3 * size.num_rows + size.num_entries));
  table.read_dirty(num_reqs, diff);
  table.check_integrity();
  return diff;
}

TEST(BlockTable, DirtyRangesAreWhatChangedSinceTheLastCommit) {
  BlockTable table(options());
  EXPECT_EQ(read_dirty(table, 3), Row{});
  table.append_row(kBlocks, 1);
  EXPECT_EQ(read_dirty(table, 3), (Row{1, 0, 2, 3, 7}));
  EXPECT_EQ(read_dirty(table, 1), Row{});
  table.mark_clean(1);  // row 1 is not among the first row
  EXPECT_EQ(read_dirty(table, 2), (Row{1, 0, 2, 3, 7}));
  table.mark_clean(2);
  table.append_row(kBlocks, 1);
  table.append_row(kBlocks, 0);
  EXPECT_EQ(read_dirty(table, 3), (Row{1, 0, 2, 0, 2, 4, 3, 7, 3, 7}));
  table.mark_clean(3);
  table.replace_blocks(std::vector{BlockId(9)}, 1, 2);
  EXPECT_EQ(read_dirty(table, 3), (Row{1, 2, 1, 9}));
}

TEST(BlockTable, EntriesThatAreClearedAreDirty) {
  BlockTable table(options());
  table.append_row(kBlocks, 0);
  table.append_row(std::vector{BlockId(5)}, 2);
  table.mark_clean(3);
  table.add_row(std::vector{BlockId(4)}, 0);
  EXPECT_EQ(read_dirty(table, 3), (Row{0, 0, 2, 4, 0}));
  table.mark_clean(3);
  table.move_row(0, 2);
  EXPECT_EQ(read_dirty(table, 3), (Row{2, 0, 0, 0, 1, 2, 4, 0}));
  table.mark_clean(3);
  table.swap_row(2, 1);
  EXPECT_EQ(read_dirty(table, 3), (Row{2, 1, 0, 0, 1, 2, 0, 4}));
  table.mark_clean(3);
  table.clear();
  EXPECT_EQ(read_dirty(table, 3), (Row{1, 0, 1, 0}));
}

TEST(BlockTable, ADirtyRangeSpansAllChangesOfARow) {
  BlockTable table(options());
  table.append_row(std::vector{BlockId(1), BlockId(2), BlockId(3)}, 0);
  table.append_row(std::vector{BlockId(4)}, 1);
  table.mark_clean(3);
  table.replace_blocks(std::vector{BlockId(8)}, 0, 2);
  table.replace_blocks(std::vector{BlockId(9)}, 0, 1);
  EXPECT_EQ(read_dirty(table, 3), (Row{0, 1, 2, 9, 8}));
  table.mark_clean(3);
  table.replace_blocks(std::vector{BlockId(5)}, 0, 0);
  table.replace_blocks(std::vector{BlockId(6)}, 0, 2);
  EXPECT_EQ(read_dirty(table, 3), (Row{0, 0, 3, 5, 9, 6}));
  table.mark_clean(3);
  table.swap_row(1, 0);  // the row given first is the shorter one
  EXPECT_EQ(read_dirty(table, 3), (Row{1, 0, 0, 0, 3, 6, 5, 9, 6, 4, 0, 0}));
  table.mark_clean(3);
  table.move_row(1, 0);  // the target was the shorter one
  EXPECT_EQ(read_dirty(table, 3), (Row{0, 1, 0, 0, 3, 6, 5, 9, 6, 0, 0, 0}));
}

TEST(BlockTable, RowsLieInTheMemoryThatIsGiven) {
  std::vector<std::int32_t> memory(12, 99);
  BlockTable table(options(), memory);
  EXPECT_EQ(memory, Row(12, 0));
  table.append_row(kBlocks, 2);
  EXPECT_EQ(memory, (Row{0, 0, 0, 0, 0, 0, 0, 0, 3, 7, 0, 0}));
  EXPECT_THROW(BlockTable(options(), std::span(memory).first(11)), std::invalid_argument);
}

TEST(BlockTable, ReplacesBlocksThatARowHas) {
  BlockTable table(options(64, 32));
  table.append_row(kBlocks, 0);
  table.replace_blocks(std::vector{BlockId(5)}, 0, 1);
  EXPECT_EQ(row(table, 0), (Row{6, 7, 10, 11, 0, 0, 0, 0}));
  table.replace_blocks(std::vector{kNullBlockId}, 0, 0);
  EXPECT_EQ(row(table, 0), (Row{0, 1, 10, 11, 0, 0, 0, 0}));
  table.mark_clean(3);
  EXPECT_THROW(table.replace_blocks(kBlocks, 0, 1), std::invalid_argument);
  EXPECT_THROW(table.replace_blocks(kBlocks, 0, -1), std::invalid_argument);
  EXPECT_THROW(table.replace_blocks({}, 0, 3), std::invalid_argument);
  EXPECT_THROW(table.replace_blocks(std::vector{BlockId(-1)}, 0, 0), std::invalid_argument);
  EXPECT_THROW(table.replace_blocks({}, 3, 0), std::out_of_range);
  Row wrong_size(1);
  EXPECT_THROW(table.read_dirty(3, wrong_size), std::invalid_argument);
  EXPECT_EQ(read_dirty(table, 3), Row{});
}

TEST(BlockTable, CommitDirtyWritesWhatHasChangedAndNothingElse) {
  BlockTable table(options());
  table.add_row(kBlocks, 0);
  table.add_row(kBlocks, 2);
  Row copy(12, -1);
  EXPECT_TRUE(table.commit_dirty(2, copy));
  EXPECT_EQ(copy, (Row{3, 7, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1}));
  EXPECT_FALSE(table.commit_dirty(2, copy));
  table.replace_blocks(std::vector{BlockId(5)}, 2, 1);
  EXPECT_TRUE(table.commit_dirty(3, copy));
  EXPECT_EQ(copy, (Row{3, 7, -1, -1, -1, -1, -1, -1, 3, 5, -1, -1}));
  EXPECT_EQ(read_dirty(table, 3), Row{});
}

TEST(BlockTable, ARefusedCommitLeavesTheChangesToTheNext) {
  BlockTable table(options());
  table.add_row(kBlocks, 1);
  Row too_small(8), copy(12);
  EXPECT_THROW(table.commit_dirty(3, too_small), std::invalid_argument);
  EXPECT_THROW(table.commit_dirty(4, copy), std::invalid_argument);
  EXPECT_EQ(copy, Row(12));
  EXPECT_TRUE(table.commit_dirty(3, copy));
}

TEST(BlockTable, CheckIntegrityFindsStaleEntries) {
  BlockTable table(options());
  EXPECT_NO_THROW(table.check_integrity());
  table.table()[5] = 9;
  EXPECT_THROW(table.check_integrity(), InvariantError);
}

TEST(BlockTable, RefusesBadOptions) {
  EXPECT_THROW(BlockTable(options(0, 1)), std::invalid_argument);
  EXPECT_THROW(BlockTable(options(16, 32)), std::invalid_argument);
  EXPECT_THROW(BlockTable(options(16, 5)), std::invalid_argument);
  EXPECT_THROW(BlockTable(options(16, 0)), std::invalid_argument);
}

TEST(BlockTableWidth, RoundsToWholeTilesOfTokens) {
  EXPECT_EQ(get_block_table_width(5, 16), 8);
  EXPECT_EQ(get_block_table_width(5, 48), 8);
  EXPECT_EQ(get_block_table_width(5, 16, std::nullopt), 5);
  EXPECT_EQ(get_block_table_width(8, 16), 8);
  EXPECT_THROW(static_cast<void>(get_block_table_width(5, 16, 0)), std::invalid_argument);
  EXPECT_THROW(static_cast<void>(get_block_table_width(-1, 16)), std::invalid_argument);
}

}  // namespace
}  // namespace paged_kv
