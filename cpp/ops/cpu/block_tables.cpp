// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/block_tables.h"

#include "paged_kv/check.h"

namespace paged_kv::cpu {
namespace {

void check_row(const char* name, std::int64_t i, std::int64_t row, std::int64_t lowest,
               std::int64_t num_rows) {
  PAGED_KV_CHECK(row >= lowest && row < num_rows, name, "[", i, "]: expected a row in [", lowest,
                 ", ", num_rows, "), got ", row);
}

void check_writes(const ApplyBlockTableWritesParams& p) {
  std::int64_t content = 0;
  for (std::int64_t i = 0; i < p.rows.size; ++i) {
    check_row("rows", i, p.rows[i], 0, p.table.num_rows);
    const std::int64_t length = p.cu_lens[i] - content;
    PAGED_KV_CHECK(length >= 0, "cu_lens: expected not to decrease, got ", content, " then ",
                   p.cu_lens[i], " at ", i);
    PAGED_KV_CHECK(p.starts[i] >= 0 && p.starts[i] + length <= p.table.num_cols, "starts[", i,
                   "]: expected ", length, " block ids to fit the table's ", p.table.num_cols,
                   " columns, got start ", p.starts[i]);
    content = p.cu_lens[i];
  }
  PAGED_KV_CHECK(content <= p.contents.size, "contents: expected at least cu_lens[-1] = ", content,
                 " block ids, got ", p.contents.size);
}

}  // namespace

void apply_block_table_writes(const ApplyBlockTableWritesParams& p) {
  check_writes(p);
  std::int64_t content = 0;
  for (std::int64_t i = 0; i < p.rows.size; ++i) {
    for (std::int64_t col = p.starts[i]; content < p.cu_lens[i]; ++content, ++col) {
      p.table(p.rows[i], col) = p.contents[content];
    }
  }
}

void gather_block_tables(const GatherBlockTablesParams& p) {
  PAGED_KV_CHECK(p.out.num_rows >= p.idx_mapping.size, "out: expected at least ",
                 p.idx_mapping.size, " rows, one an entry of idx_mapping, got ", p.out.num_rows);
  for (std::int64_t i = 0; i < p.idx_mapping.size; ++i) {
    const std::int64_t row = p.idx_mapping[i];
    check_row("idx_mapping", i, row, -1, p.table.num_rows);
    if (row < 0) {
      continue;
    }
    const std::int64_t width =
        p.table.num_cols < p.out.num_cols ? p.table.num_cols : p.out.num_cols;
    PAGED_KV_CHECK(p.num_blocks[row] >= 0 && p.num_blocks[row] <= width, "num_blocks[", row,
                   "]: expected to be in [0, ", width, "], got ", p.num_blocks[row]);
  }
  for (std::int64_t i = 0; i < p.out.num_rows; ++i) {
    const bool is_padding = i >= p.idx_mapping.size || p.idx_mapping[i] < 0;
    const std::int64_t row = is_padding ? -1 : p.idx_mapping[i];
    const std::int64_t num_cols = is_padding ? p.out.num_cols : p.num_blocks[row];
    for (std::int64_t col = 0; col < num_cols; ++col) {
      p.out(i, col) = is_padding ? 0 : p.table(row, col);
    }
  }
}

}  // namespace paged_kv::cpu
