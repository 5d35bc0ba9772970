// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/block_table.h"

#include "paged_kv/check.h"
#include "paged_kv/math.h"
#include "paged_kv/slot_mapping.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace paged_kv {
namespace {

constexpr std::int64_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();

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

BlockTable::BlockTable(const BlockTableOptions& options)
    : options_(checked(options)),
      table_(static_cast<std::size_t>(options.max_num_reqs * width()), kNullBlockId.value()),
      num_blocks_per_row_(static_cast<std::size_t>(options.max_num_reqs), 0),
      slot_mapping_(static_cast<std::size_t>(options.max_num_batched_tokens), kPadSlot) {}

void BlockTable::append_row(std::span<const BlockId> block_ids, std::int64_t row_idx) {
  check_row(row_idx, "row_idx");
  check_blocks(block_ids, num_blocks(row_idx));
  write(block_ids, row_idx);
}

void BlockTable::add_row(std::span<const BlockId> block_ids, std::int64_t row_idx) {
  check_row(row_idx, "row_idx");
  check_blocks(block_ids, 0);
  clear_row(row_idx);
  write(block_ids, row_idx);
}

void BlockTable::clear_row(std::int64_t row_idx) {
  check_row(row_idx, "row_idx");
  std::ranges::fill(row(row_idx).first(static_cast<std::size_t>(num_blocks(row_idx))),
                    kNullBlockId.value());
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
  clear_row(src);
}

void BlockTable::swap_row(std::int64_t src, std::int64_t tgt) {
  check_row(src, "src");
  check_row(tgt, "tgt");
  if (src == tgt) return;
  std::ranges::swap_ranges(row(src), row(tgt));
  std::swap(num_blocks(src), num_blocks(tgt));
}

void BlockTable::compute_slot_mapping(std::int64_t num_reqs,
                                      std::span<const std::int32_t> query_start_loc,
                                      std::span<const std::int64_t> positions) {
  PAGED_KV_CHECK(num_reqs >= 0 && num_reqs <= options_.max_num_reqs, "num_reqs must be in [0, ",
                 options_.max_num_reqs, "], got ", num_reqs);
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
  PAGED_KV_CHECK(num_reqs >= 0 && num_reqs <= options_.max_num_reqs, "num_reqs must be in [0, ",
                 options_.max_num_reqs, "], got ", num_reqs);
  const auto num_entries = static_cast<std::size_t>(num_reqs * width());
  PAGED_KV_CHECK(out.size() >= num_entries, "out: expected room for ", num_reqs, " rows of ",
                 width(), " entries, got ", out.size(), " entries");
  std::copy_n(table_.begin(), num_entries, out.begin());
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
  const std::int64_t max_block_id = kMaxInt32 / ratio() - 1;
  for (const BlockId id : block_ids) {
    PAGED_KV_CHECK(id.valid() && id.value() <= max_block_id, "block id must be in [0, ",
                   max_block_id, "], got ", id);
  }
}

std::span<std::int32_t> BlockTable::row(std::int64_t row_idx) noexcept {
  return std::span(table_).subspan(static_cast<std::size_t>(row_idx * width()),
                                   static_cast<std::size_t>(width()));
}

void BlockTable::write(std::span<const BlockId> block_ids, std::int64_t row_idx) noexcept {
  const auto num_parts = static_cast<std::int32_t>(ratio());
  auto entry = row(row_idx).begin() + num_blocks(row_idx);
  for (const BlockId id : block_ids) {
    for (std::int32_t part = 0; part < num_parts; ++part) *entry++ = id.value() * num_parts + part;
  }
  num_blocks(row_idx) += static_cast<std::int32_t>(block_ids.size()) * num_parts;
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
}

}  // namespace paged_kv
