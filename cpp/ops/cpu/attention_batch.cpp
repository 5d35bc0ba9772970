// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/attention_batch.h"

#include "paged_kv/check.h"
#include "paged_kv/math.h"

#include <algorithm>

namespace paged_kv::cpu {
namespace {

void check_query_starts(const AttentionBatch& batch) {
  const auto& starts = batch.query_start_loc;
  if (starts.data == nullptr) {
    PAGED_KV_CHECK(batch.num_seqs() <= batch.num_tokens,
                   "seq_lens: expected at most num_tokens = ", batch.num_tokens, " sequences, got ",
                   batch.num_seqs());
    return;
  }
  PAGED_KV_CHECK(starts[0] == 0, "query_start_loc[0]: expected 0, got ", starts[0]);
  for (std::int64_t seq = 0; seq < batch.num_seqs(); ++seq) {
    PAGED_KV_CHECK(starts[seq] <= starts[seq + 1], "query_start_loc[", seq + 1,
                   "]: expected >= ", starts[seq], " (the start before), got ", starts[seq + 1]);
  }
  PAGED_KV_CHECK(starts[batch.num_seqs()] <= batch.num_tokens, "query_start_loc[", batch.num_seqs(),
                 "]: expected <= num_tokens = ", batch.num_tokens, ", got ",
                 starts[batch.num_seqs()]);
}

void check_lengths(const AttentionBatch& batch, std::int64_t seq) {
  const std::int64_t seq_len = batch.seq_lens[seq];
  const std::int64_t query_len = batch.query_len(seq);
  const std::int64_t capacity = batch.block_tables.num_cols * batch.block_size;
  PAGED_KV_CHECK(seq_len >= 0, "seq_lens[", seq, "]: expected >= 0, got ", seq_len);
  PAGED_KV_CHECK(seq_len <= capacity, "seq_lens[", seq, "]: expected <= ", capacity,
                 " (the tokens that a row of block_tables holds), got ", seq_len);
  PAGED_KV_CHECK(batch.max_seq_len < 0 || seq_len <= batch.max_seq_len, "seq_lens[", seq,
                 "]: expected <= max_seq_len = ", batch.max_seq_len, ", got ", seq_len);
  PAGED_KV_CHECK(batch.max_query_len < 0 || query_len <= batch.max_query_len,
                 "query_start_loc: sequence ", seq, " has ", query_len,
                 " queries, expected <= max_query_len = ", batch.max_query_len);
}

void check_block_ids(const AttentionBatch& batch, const AttentionMask& mask, std::int64_t seq) {
  const KeyRange keys = visible_keys(batch, mask, seq, 0, batch.query_len(seq));
  const std::int64_t end_block = ceil_div(keys.end, batch.block_size);
  for (std::int64_t i = keys.begin / batch.block_size; i < end_block; ++i) {
    const std::int32_t block_id = batch.block_tables(seq, i);
    PAGED_KV_CHECK(block_id >= 0 && block_id < batch.num_blocks, "block_tables[", seq, ", ", i,
                   "]: expected a block id in [0, ", batch.num_blocks, "), got ", block_id);
  }
}

}  // namespace

KeyRange visible_keys(const AttentionBatch& batch, const AttentionMask& mask, std::int64_t seq,
                      std::int64_t query_begin, std::int64_t num_queries) noexcept {
  const std::int64_t seq_len = batch.seq_lens[seq];
  const std::int64_t first_pos = batch.first_query_pos(seq) + query_begin;
  // The first query sees the earliest key, the last query the latest.
  const std::int64_t begin = mask.visible(first_pos, seq_len).begin;
  const std::int64_t end = mask.visible(first_pos + num_queries - 1, seq_len).end;
  return {begin, std::max(begin, end)};
}

void check_batch(const AttentionBatch& batch, const AttentionMask& mask) {
  check_query_starts(batch);
  for (std::int64_t seq = 0; seq < batch.num_seqs(); ++seq) {
    if (batch.query_len(seq) == 0) continue;
    check_lengths(batch, seq);
    check_block_ids(batch, mask, seq);
  }
}

}  // namespace paged_kv::cpu
