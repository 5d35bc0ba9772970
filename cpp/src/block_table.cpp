// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/block_table.h"

#include "paged_kv/check.h"
#include "paged_kv/math.h"
#include "paged_kv/slot_mapping.h"

#include <algorithm>
#include <numeric>

namespace paged_kv {
namespace {

const BlockTableOptions& checked(const BlockTableOptions& options) {
  const auto check_positive = [](const char* name, std::int64_t value) {
    PAGED_KV_CHECK(value > 0 && value <= kMaxInt32, name, " must be in [1, ", kMaxInt32, "], got ",
                   value);
  };
  check_positive("block_size", options.block_size);
  check_positive("max_num_reqs", options.max_num_reqs);
  check_positive("max_num_blocks_per_req", options.max_num_blocks_per_req);
  check_positive("max_num_batched_tokens", options.max_num_batched_tokens);
  check_positive("kernel_block_size", options.kernel_block_size);
  PAGED_KV_CHECK(options.block_size % options.kernel_block_size == 0, "kernel_block_size (",
                 options.kernel_block_size, ") must divide block_size (", options.block_size, ")");
  const std::int64_t ratio = options.block_size / options.kernel_block_size;
  PAGED_KV_CHECK(options.max_num_blocks_per_req <= kMaxInt32 / ratio, "a row of ",
                 options.max_num_blocks_per_req, " blocks of ", ratio,
                 " kernel blocks is too long");
  return options;
}

}  // namespace

std::int64_t get_block_table_width(std::int64_t max_num_blocks, std::int64_t block_size,
                                   std::optional<std::int64_t> token_alignment) {
  PAGED_KV_CHECK(max_num_blocks >= 0, "max_num_blocks must not be negative, got ", max_num_blocks);
  PAGED_KV_CHECK(block_size > 0, "block_size must be positive, got ", block_size);
  if (!token_alignment) return max_num_blocks;
  PAGED_KV_CHECK(*token_alignment > 0, "token_alignment must be positive, got ", *token_alignment);
  return round_up(max_num_blocks, *token_alignment / std::gcd(*token_alignment, block_size));
}

BlockTable::BlockTable(const BlockTableOptions& options) : BlockTable(options, {}) {}

BlockTable::BlockTable(const BlockTableOptions& options, std::span<std::int32_t> memory)
    : options_(checked(options)),
      num_blocks_per_row_(static_cast<std::size_t>(options.max_num_reqs), 0),
      slot_mapping_(static_cast<std::size_t>(options.max_num_batched_tokens), kPadSlot),
      dirty_columns_(static_cast<std::size_t>(options.max_num_reqs)) {
  const auto num_entries = static_cast<std::size_t>(options.max_num_reqs * width());
  PAGED_KV_CHECK(memory.data() == nullptr || memory.size() == num_entries, "memory: expected ",
                 options.max_num_reqs, " rows of ", width(), " entries, got ", memory.size(),
                 " entries");
  if (memory.data() == nullptr) own_memory_.resize(num_entries);
  table_ = memory.data() == nullptr ? std::span(own_memory_) : memory;
  std::ranges::fill(table_, kNullBlockId.value());
  // mark_dirty() must not fail half-way through a change.
  dirty_rows_.reserve(dirty_columns_.size());
}

void BlockTable::append_row(std::span<const BlockId> block_ids, std::int64_t row_idx) {
  check_append_row(block_ids, row_idx);
  append(block_ids, row_idx);
}

void BlockTable::add_row(std::span<const BlockId> block_ids, std::int64_t row_idx) {
  check_add_row(block_ids, row_idx);
  clear_row(row_idx);
  append(block_ids, row_idx);
}

void BlockTable::check_append_row(std::span<const BlockId> block_ids, std::int64_t row_idx) const {
  check_row(row_idx, "row_idx");
  check_blocks(block_ids, num_blocks_per_row_[static_cast<std::size_t>(row_idx)]);
}

void BlockTable::check_add_row(std::span<const BlockId> block_ids, std::int64_t row_idx) const {
  check_row(row_idx, "row_idx");
  check_blocks(block_ids, 0);
}

void BlockTable::replace_blocks(std::span<const BlockId> block_ids, std::int64_t row_idx,
                                std::int64_t start) {
  check_row(row_idx, "row_idx");
  const std::int64_t num_held = num_blocks(row_idx) / ratio();
  const auto num_new = static_cast<std::int64_t>(block_ids.size());
  PAGED_KV_CHECK(start >= 0 && start <= num_held && num_new <= num_held - start, "cannot replace ",
                 num_new, " blocks from block ", start, " on: the row has ", num_held);
  check_ids(block_ids);
  write(block_ids, row_idx, static_cast<std::int32_t>(start * ratio()));
}

void BlockTable::clear_row(std::int64_t row_idx) {
  check_row(row_idx, "row_idx");
  std::ranges::fill(row(row_idx).first(static_cast<std::size_t>(num_blocks(row_idx))),
                    kNullBlockId.value());
  mark_dirty(row_idx, {0, num_blocks(row_idx)});
  num_blocks(row_idx) = 0;
}

void BlockTable::clear() {
  for (std::int64_t row_idx = 0; row_idx < options_.max_num_reqs; ++row_idx) clear_row(row_idx);
}

void BlockTable::move_row(std::int64_t src, std::int64_t tgt) {
  check_row(src, "src");
  check_row(tgt, "tgt");
  if (src == tgt) return;
  clear_row(tgt);
  std::ranges::copy(row(src).first(static_cast<std::size_t>(num_blocks(src))), row(tgt).begin());
  num_blocks(tgt) = num_blocks(src);
  mark_dirty(tgt, {0, num_blocks(tgt)});
  clear_row(src);
}

void BlockTable::swap_row(std::int64_t src, std::int64_t tgt) {
  check_row(src, "src");
  check_row(tgt, "tgt");
  if (src == tgt) return;
  const std::int32_t longer = std::max(num_blocks(src), num_blocks(tgt));
  std::ranges::swap_ranges(row(src).first(static_cast<std::size_t>(longer)),
                           row(tgt).first(static_cast<std::size_t>(longer)));
  std::swap(num_blocks(src), num_blocks(tgt));
  mark_dirty(src, {0, longer});
  mark_dirty(tgt, {0, longer});
}

void BlockTable::compute_slot_mapping(std::int64_t num_reqs,
                                      std::span<const std::int32_t> query_start_loc,
                                      std::span<const std::int64_t> positions) {
  check_num_reqs(num_reqs);
  PAGED_KV_CHECK(static_cast<std::int64_t>(query_start_loc.size()) > num_reqs,
                 "query_start_loc: expected at least ", num_reqs + 1, " entries, got ",
                 query_start_loc.size());
  // A position past the row's own blocks would read the null blocks that follow them.
  for (std::int64_t r = 0; r < num_reqs; ++r) {
    const std::int64_t num_slots = num_blocks(r) * options_.kernel_block_size;
    const auto begin = query_start_loc[static_cast<std::size_t>(r)];
    const auto end = query_start_loc[static_cast<std::size_t>(r + 1)];
    PAGED_KV_CHECK(begin >= 0 && end <= static_cast<std::int64_t>(positions.size()),
                   "query_start_loc: expected to lie in the ", positions.size(),
                   " positions, got [", begin, ", ", end, ") for row ", r);
    for (auto token = begin; token < end; ++token) {
      const std::int64_t position = positions[static_cast<std::size_t>(token)];
      PAGED_KV_CHECK(position < num_slots, "positions[", token, "]: expected to lie in the ",
                     num_slots, " slots of row ", r, ", got ", position);
    }
  }
  paged_kv::compute_slot_mapping(
      {.query_start_loc = {.data = query_start_loc.data(), .size = num_reqs + 1, .stride = 1},
       .positions = {.data = positions.data(),
                     .size = static_cast<std::int64_t>(positions.size()),
                     .stride = 1},
       .block_tables = {.data = table_.data(),
                        .num_rows = options_.max_num_reqs,
                        .num_cols = width(),
                        .row_stride = width(),
                        .col_stride = 1},
       .idx_mapping = {},
       .slot_mapping = {.data = slot_mapping_.data(),
                        .size = options_.max_num_batched_tokens,
                        .stride = 1},
       .block_size = options_.kernel_block_size});
}

void BlockTable::commit_block_table(std::int64_t num_reqs, std::span<std::int32_t> out) const {
  check_num_reqs(num_reqs);
  const auto num_entries = static_cast<std::size_t>(num_reqs * width());
  PAGED_KV_CHECK(out.size() >= num_entries, "out: expected room for ", num_reqs, " rows of ",
                 width(), " entries, got ", out.size(), " entries");
  std::copy_n(table_.begin(), num_entries, out.begin());
}

DirtyBlockTable BlockTable::dirty(std::int64_t num_reqs) const {
  check_num_reqs(num_reqs);
  DirtyBlockTable result;
  for (const std::int32_t row_idx : dirty_rows_) {
    if (row_idx >= num_reqs) continue;
    ++result.num_rows;
    result.num_entries += dirty_columns_[static_cast<std::size_t>(row_idx)].size();
  }
  return result;
}

void BlockTable::read_dirty(std::int64_t num_reqs, std::span<std::int32_t> out) const {
  const DirtyBlockTable size = dirty(num_reqs);
  PAGED_KV_CHECK(static_cast<std::int64_t>(out.size()) == 3 * size.num_rows + size.num_entries,
                 "out: expected 3 * ", size.num_rows, " + ", size.num_entries, " entries, got ",
                 out.size());
  PAGED_KV_CHECK(size.num_entries <= kMaxInt32, size.num_entries,
                 " changed entries are too many for one diff");
  auto rows = out.begin();
  auto starts = rows + size.num_rows;
  auto ends = starts + size.num_rows;
  const auto contents = ends + size.num_rows;
  auto content = contents;
  for (const std::int32_t row_idx : dirty_rows_) {
    if (row_idx >= num_reqs) continue;
    const Columns columns = dirty_columns_[static_cast<std::size_t>(row_idx)];
    const auto entries = row(row_idx).begin();
    content = std::copy(entries + columns.begin, entries + columns.end, content);
    *rows++ = row_idx;
    *starts++ = columns.begin;
    *ends++ = static_cast<std::int32_t>(content - contents);
  }
}

bool BlockTable::commit_dirty(std::int64_t num_reqs, std::span<std::int32_t> out) {
  check_num_reqs(num_reqs);
  PAGED_KV_CHECK(out.size() == table_.size(), "out: expected ", options_.max_num_reqs, " rows of ",
                 width(), " entries, got ", out.size(), " entries");
  bool has_changed = false;
  for (const std::int32_t row_idx : dirty_rows_) {
    if (row_idx >= num_reqs) continue;
    const Columns columns = dirty_columns_[static_cast<std::size_t>(row_idx)];
    const auto first = static_cast<std::size_t>(row_idx * width() + columns.begin);
    const auto size = static_cast<std::size_t>(columns.size());
    std::ranges::copy(table_.subspan(first, size), out.subspan(first).begin());
    has_changed = true;
  }
  mark_clean(num_reqs);
  return has_changed;
}

void BlockTable::mark_clean(std::int64_t num_reqs) {
  check_num_reqs(num_reqs);
  std::erase_if(dirty_rows_, [&](std::int32_t row_idx) {
    if (row_idx >= num_reqs) return false;
    dirty_columns_[static_cast<std::size_t>(row_idx)] = {};
    return true;
  });
}

void BlockTable::check_num_reqs(std::int64_t num_reqs) const {
  PAGED_KV_CHECK(num_reqs >= 0 && num_reqs <= options_.max_num_reqs, "num_reqs must be in [0, ",
                 options_.max_num_reqs, "], got ", num_reqs);
}

void BlockTable::check_row(std::int64_t row_idx, const char* name) const {
  PAGED_KV_CHECK_AS(std::out_of_range, row_idx >= 0 && row_idx < options_.max_num_reqs, name,
                    " must be in [0, ", options_.max_num_reqs, "), got ", row_idx);
}

void BlockTable::check_blocks(std::span<const BlockId> block_ids, std::int64_t num_held) const {
  const auto num_new = static_cast<std::int64_t>(block_ids.size());
  PAGED_KV_CHECK(num_held / ratio() + num_new <= options_.max_num_blocks_per_req,
                 "a row has room for ", options_.max_num_blocks_per_req, " blocks, cannot add ",
                 num_new, " to ", num_held / ratio());
  check_ids(block_ids);
}

void BlockTable::check_ids(std::span<const BlockId> block_ids) const {
  const std::int64_t max_block_id = kMaxInt32 / ratio() - 1;
  for (const BlockId id : block_ids) {
    PAGED_KV_CHECK(id.valid() && id.value() <= max_block_id, "block id must be in [0, ",
                   max_block_id, "], got ", id);
  }
}

std::span<std::int32_t> BlockTable::row(std::int64_t row_idx) const noexcept {
  return table_.subspan(static_cast<std::size_t>(row_idx * width()),
                        static_cast<std::size_t>(width()));
}

void BlockTable::append(std::span<const BlockId> block_ids, std::int64_t row_idx) {
  write(block_ids, row_idx, num_blocks(row_idx));
  num_blocks(row_idx) +=
      static_cast<std::int32_t>(block_ids.size()) * static_cast<std::int32_t>(ratio());
}

void BlockTable::write(std::span<const BlockId> block_ids, std::int64_t row_idx,
                       std::int32_t column) {
  const auto num_parts = static_cast<std::int32_t>(ratio());
  const auto begin = row(row_idx).begin() + column;
  auto entry = begin;
  for (const BlockId id : block_ids) {
    for (std::int32_t part = 0; part < num_parts; ++part) *entry++ = id.value() * num_parts + part;
  }
  mark_dirty(row_idx, {column, column + static_cast<std::int32_t>(entry - begin)});
}

void BlockTable::mark_dirty(std::int64_t row_idx, Columns columns) {
  if (columns.size() == 0) return;
  Columns& dirty = dirty_columns_[static_cast<std::size_t>(row_idx)];
  if (dirty.size() == 0) {
    dirty_rows_.push_back(static_cast<std::int32_t>(row_idx));
    dirty = columns;
    return;
  }
  dirty = {std::min(dirty.begin, columns.begin), std::max(dirty.end, columns.end)};
}

void BlockTable::check_integrity() const {
  const auto row_width = static_cast<std::size_t>(width());
  for (std::size_t r = 0; r < num_blocks_per_row_.size(); ++r) {
    const std::int32_t num_held = num_blocks_per_row_[r];
    PAGED_KV_CHECK_AS(InvariantError, num_held >= 0 && num_held <= width(), "T1: row ", r, " has ",
                      num_held, " blocks, its width is ", width());
    for (std::size_t i = static_cast<std::size_t>(num_held); i < row_width; ++i) {
      const std::int32_t id = table_[r * row_width + i];
      PAGED_KV_CHECK_AS(InvariantError, id == kNullBlockId.value(), "T2: row ", r, " has ",
                        num_held, " blocks, but entry ", i, " is ", id);
    }
  }
  std::vector<bool> is_listed(dirty_columns_.size());
  for (const std::int32_t r : dirty_rows_) {
    PAGED_KV_CHECK_AS(InvariantError, !is_listed[static_cast<std::size_t>(r)], "T3: row ", r,
                      " is listed as dirty twice");
    is_listed[static_cast<std::size_t>(r)] = true;
  }
  for (std::size_t r = 0; r < dirty_columns_.size(); ++r) {
    const Columns columns = dirty_columns_[r];
    const bool is_dirty = columns.begin >= 0 && columns.begin < columns.end;
    PAGED_KV_CHECK_AS(InvariantError, is_dirty == is_listed[r] && columns.end <= width(),
                      "T3: row ", r, " has the dirty columns ", columns.begin, " .. ", columns.end);
  }
}

}  // namespace paged_kv
