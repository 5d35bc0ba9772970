// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "paged_kv/ids.h"

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace paged_kv {

// Blocks of a row, rounded up so that they hold a multiple of `token_alignment` tokens, which lets
// kernels read whole tiles of a row. nullopt: as it is.
[[nodiscard]] std::int64_t get_block_table_width(std::int64_t max_num_blocks,
                                                 std::int64_t block_size,
                                                 std::optional<std::int64_t> token_alignment = 128);

struct BlockTableOptions {
  std::int64_t block_size = 0;  // tokens per block of the pool ("manager block")
  std::int64_t max_num_reqs = 0;
  std::int64_t max_num_blocks_per_req = 0;  // manager blocks
  std::int64_t max_num_batched_tokens = 0;
  std::int64_t kernel_block_size = 0;  // tokens per block as kernels see it; divides block_size
};

// Entries that have changed since mark_clean(), at most one range a row.
struct DirtyBlockTable {
  std::int64_t num_rows = 0;
  std::int64_t num_entries = 0;  // in all ranges together
};

// The block tables of a batch, one row a request, in one int32 buffer that kernels can read.
//
// Where a kernel works on smaller blocks than the pool hands out, manager block b is split into
// ratio = block_size / kernel_block_size kernel blocks b * ratio + j. Methods take manager blocks;
// the rows hold kernel blocks.
//
// A copy elsewhere, e.g. on a device, follows by diffs: read_dirty() gives what has changed, in the
// form that the op apply_block_table_writes takes, and mark_clean() says that the copy has it.
// Entries that are written through table() are not tracked.
//
// A call that throws std::invalid_argument or std::out_of_range changes nothing.
//
// Invariants, checked by check_integrity():
//   T1  row r holds num_blocks_per_row()[r] <= width() kernel blocks;
//   T2  every entry after them is the null block, so a kernel that reads too far, or a row that is
//       used for padding, meets no block of another request;
//   T3  a row is listed as dirty once, with a range inside the row, or has no range.
//
// Thread rule: one owner thread.
// Source: vLLM 0.32 v1/worker/block_table.py::BlockTable.
class BlockTable {
 public:
  explicit BlockTable(const BlockTableOptions& options);
  // The rows are `memory`, of max_num_reqs * width() entries, which must outlive the table; it is
  // set to the null block.
  BlockTable(const BlockTableOptions& options, std::span<std::int32_t> memory);
  BlockTable(const BlockTable&) = delete;
  BlockTable& operator=(const BlockTable&) = delete;

  [[nodiscard]] const BlockTableOptions& options() const noexcept { return options_; }
  // Kernel blocks per manager block, and per row.
  [[nodiscard]] std::int64_t ratio() const noexcept {
    return options_.block_size / options_.kernel_block_size;
  }
  [[nodiscard]] std::int64_t width() const noexcept {
    return options_.max_num_blocks_per_req * ratio();
  }

  // [max_num_reqs, width()], row-major. The address does not change.
  [[nodiscard]] std::span<std::int32_t> table() noexcept { return table_; }
  // [max_num_reqs], in kernel blocks.
  [[nodiscard]] std::span<const std::int32_t> num_blocks_per_row() const noexcept {
    return num_blocks_per_row_;
  }
  // [max_num_batched_tokens], as compute_slot_mapping() left it. The address does not change.
  [[nodiscard]] std::span<std::int64_t> slot_mapping() noexcept { return slot_mapping_; }

  // Adds blocks at the end of a row. O(blocks).
  void append_row(std::span<const BlockId> block_ids, std::int64_t row_idx);
  // Makes `block_ids` the row. O(blocks before and after).
  void add_row(std::span<const BlockId> block_ids, std::int64_t row_idx);
  // Throw what append_row() and add_row() would throw, and change nothing.
  void check_append_row(std::span<const BlockId> block_ids, std::int64_t row_idx) const;
  void check_add_row(std::span<const BlockId> block_ids, std::int64_t row_idx) const;
  // Puts `block_ids` in the place of as many blocks of a row, from block `start` on: a block that
  // was copied before a write, or null blocks for those that have left a sliding window. O(blocks).
  void replace_blocks(std::span<const BlockId> block_ids, std::int64_t row_idx, std::int64_t start);
  // Empties a row, or all. O(blocks in it).
  void clear_row(std::int64_t row_idx);
  void clear();
  // Makes row `tgt` what row `src` is, and empties `src`. O(blocks of both).
  void move_row(std::int64_t src, std::int64_t tgt);
  // O(blocks of both).
  void swap_row(std::int64_t src, std::int64_t tgt);

  // Fills slot_mapping(): row r has the tokens [query_start_loc[r], query_start_loc[r + 1]) of
  // `positions`; every slot after the last token is -1, so that a batch padded to the full size
  // writes nothing there. Throws if a position is not covered by the row's blocks.
  // O(max_num_batched_tokens).
  void compute_slot_mapping(std::int64_t num_reqs, std::span<const std::int32_t> query_start_loc,
                            std::span<const std::int64_t> positions);

  // Copies rows [0, num_reqs), each over the full width, to `out` (e.g. pinned memory that is then
  // sent to a device): out[r * width() + i]. O(num_reqs * width()).
  void commit_block_table(std::int64_t num_reqs, std::span<std::int32_t> out) const;

  // What has changed in rows [0, num_reqs) since mark_clean(). O(rows changed).
  [[nodiscard]] DirtyBlockTable dirty(std::int64_t num_reqs) const;
  // Fills `out`, of 3 * num_rows + num_entries as dirty() has them: the rows; the first column that
  // changed in each; the running sum of the lengths, each row's own included; the entries.
  // O(rows and entries changed).
  void read_dirty(std::int64_t num_reqs, std::span<std::int32_t> out) const;
  // Forgets the changes of rows [0, num_reqs). O(rows changed).
  void mark_clean(std::int64_t num_reqs);
  // The three in one, for a copy that the host can write to: brings rows [0, num_reqs) of `out`,
  // [max_num_reqs, width()] like table(), up to date. Returns whether anything had changed.
  // O(rows and entries changed).
  bool commit_dirty(std::int64_t num_reqs, std::span<std::int32_t> out);

  // Throws InvariantError if one of T1 .. T3 does not hold. O(max_num_reqs * width()).
  void check_integrity() const;

 private:
  struct Columns {
    std::int32_t begin = 0;
    std::int32_t end = 0;
    [[nodiscard]] std::int32_t size() const noexcept { return end - begin; }
  };

  void check_num_reqs(std::int64_t num_reqs) const;
  void check_row(std::int64_t row_idx, const char* name) const;
  void check_blocks(std::span<const BlockId> block_ids, std::int64_t num_held) const;
  void check_ids(std::span<const BlockId> block_ids) const;
  [[nodiscard]] std::span<std::int32_t> row(std::int64_t row_idx) const noexcept;
  [[nodiscard]] std::int32_t& num_blocks(std::int64_t row_idx) noexcept {
    return num_blocks_per_row_[static_cast<std::size_t>(row_idx)];
  }
  void append(std::span<const BlockId> block_ids, std::int64_t row_idx);
  void write(std::span<const BlockId> block_ids, std::int64_t row_idx, std::int32_t column);
  void mark_dirty(std::int64_t row_idx, Columns columns);

  BlockTableOptions options_;
  std::vector<std::int32_t> own_memory_;
  std::span<std::int32_t> table_;
  std::vector<std::int32_t> num_blocks_per_row_;
  std::vector<std::int64_t> slot_mapping_;
  std::vector<Columns> dirty_columns_;    // of each row; empty: the row is clean
  std::vector<std::int32_t> dirty_rows_;  // those that are not clean, in no order
};

}  // namespace paged_kv
