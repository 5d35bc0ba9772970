// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/slot_mapping.h"

#include "paged_kv/check.h"

namespace paged_kv {
namespace {

constexpr std::int64_t kPaddingRow = -1;

std::int64_t num_seqs(const SlotMappingParams& p) { return p.query_start_loc.size - 1; }

std::int64_t row_of(const SlotMappingParams& p, std::int64_t seq) {
  return p.idx_mapping.data == nullptr ? seq : p.idx_mapping[seq];
}

void check_sizes(const SlotMappingParams& p) {
  PAGED_KV_CHECK(p.block_size > 0 && p.block_size <= kMaxBlockSize,
                 "block_size: expected to be in [1, ", kMaxBlockSize, "], got ", p.block_size);
  PAGED_KV_CHECK(p.query_start_loc.size >= 1, "query_start_loc: expected [num_seqs + 1], got [0]");
  PAGED_KV_CHECK(p.query_start_loc[0] == 0, "query_start_loc: expected to start at 0, got ",
                 p.query_start_loc[0]);
  for (std::int64_t seq = 0; seq < num_seqs(p); ++seq) {
    PAGED_KV_CHECK(p.query_start_loc[seq] <= p.query_start_loc[seq + 1],
                   "query_start_loc: expected not to decrease, got ", p.query_start_loc[seq],
                   " then ", p.query_start_loc[seq + 1], " at ", seq + 1);
  }
  const std::int64_t num_tokens = p.query_start_loc[num_seqs(p)];
  PAGED_KV_CHECK(num_tokens <= p.positions.size, "positions: expected at least ", num_tokens,
                 " entries, one a token, got ", p.positions.size);
  PAGED_KV_CHECK(num_tokens <= p.slot_mapping.size, "slot_mapping: expected at least ", num_tokens,
                 " entries, one a token, got ", p.slot_mapping.size);
}

void check_tokens(const SlotMappingParams& p, std::int64_t seq) {
  const std::int64_t row = row_of(p, seq);
  if (p.idx_mapping.data == nullptr) {
    PAGED_KV_CHECK(row < p.block_tables.num_rows, "block_tables: expected at least ", row + 1,
                   " rows, one a sequence, got ", p.block_tables.num_rows);
  } else {
    PAGED_KV_CHECK(row >= kPaddingRow && row < p.block_tables.num_rows, "idx_mapping[", seq,
                   "]: expected a row of block_tables in [-1, ", p.block_tables.num_rows, "), got ",
                   row);
  }
  if (row == kPaddingRow) {
    return;
  }
  for (std::int64_t token = p.query_start_loc[seq]; token < p.query_start_loc[seq + 1]; ++token) {
    const std::int64_t position = p.positions[token];
    PAGED_KV_CHECK(position >= 0 && position / p.block_size < p.block_tables.num_cols, "positions[",
                   token, "]: expected to lie in the row's ", p.block_tables.num_cols,
                   " blocks of ", p.block_size, " tokens, got ", position);
    const std::int64_t block = p.block_tables(row, position / p.block_size);
    PAGED_KV_CHECK(block >= 0, "block_tables[", row, ", ", position / p.block_size,
                   "]: expected a block id for position ", position, ", got ", block);
  }
}

}  // namespace

void compute_slot_mapping(const SlotMappingParams& p) {
  check_sizes(p);
  for (std::int64_t seq = 0; seq < num_seqs(p); ++seq) {
    check_tokens(p, seq);
  }
  std::int64_t token = 0;
  for (std::int64_t seq = 0; seq < num_seqs(p); ++seq) {
    const std::int64_t row = row_of(p, seq);
    for (; token < p.query_start_loc[seq + 1]; ++token) {
      if (row == kPaddingRow) {
        p.slot_mapping[token] = kPadSlot;
        continue;
      }
      const std::int64_t position = p.positions[token];
      const std::int64_t block = p.block_tables(row, position / p.block_size);
      p.slot_mapping[token] = block * p.block_size + position % p.block_size;
    }
  }
  for (; token < p.slot_mapping.size; ++token) {
    p.slot_mapping[token] = kPadSlot;
  }
}

}  // namespace paged_kv
