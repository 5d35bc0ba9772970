// SPDX-License-Identifier: Apache-2.0
//
// Which tokens attend to which cached tokens, and where those lie: the metadata of one batch.
#pragma once

#include "paged_kv/strided_view.h"

#include <algorithm>
#include <cstdint>

namespace paged_kv::cpu {

// Positions [begin, end) of a sequence.
struct KeyRange {
  std::int64_t begin;
  std::int64_t end;

  [[nodiscard]] bool empty() const noexcept { return begin >= end; }
};

// What a query may see by its position alone.
struct AttentionMask {
  bool causal;                  // no key after the query
  std::int64_t sliding_window;  // number of keys seen, the query's own included; 0 = all

  // Visible keys of the query at position `query_pos` (negative if the sequence has fewer keys than
  // queries) in a sequence of `seq_len` keys.
  [[nodiscard]] KeyRange visible(std::int64_t query_pos, std::int64_t seq_len) const noexcept {
    const bool is_cut = sliding_window > 0 && sliding_window <= query_pos;
    const std::int64_t end = causal ? std::min(seq_len, query_pos + 1) : seq_len;
    return {is_cut ? query_pos - sliding_window + 1 : 0, std::max<std::int64_t>(end, 0)};
  }
};

struct AttentionBatch {
  VectorView<const std::int32_t> query_start_loc;  // [num_seqs + 1]; null: one query a sequence
  VectorView<const std::int32_t> seq_lens;         // [num_seqs] keys, this step's tokens included
  MatrixView<const std::int32_t> block_tables;     // [num_seqs, max_blocks]
  std::int64_t num_tokens;                         // rows of the query
  std::int64_t num_blocks;                         // of the cache
  std::int64_t block_size;
  std::int64_t max_query_len;  // bounds that the caller promises; -1: none
  std::int64_t max_seq_len;

  [[nodiscard]] std::int64_t num_seqs() const noexcept { return seq_lens.size; }
  [[nodiscard]] std::int64_t query_begin(std::int64_t seq) const noexcept {
    return query_start_loc.data == nullptr ? seq : query_start_loc[seq];
  }
  [[nodiscard]] std::int64_t query_len(std::int64_t seq) const noexcept {
    return query_begin(seq + 1) - query_begin(seq);
  }
  // Position in the sequence of its first query of this step.
  [[nodiscard]] std::int64_t first_query_pos(std::int64_t seq) const noexcept {
    return seq_lens[seq] - query_len(seq);
  }
};

// Keys that some of a sequence's queries [query_begin, query_begin + num_queries) of this step see;
// may be empty.
[[nodiscard]] KeyRange visible_keys(const AttentionBatch& batch, const AttentionMask& mask,
                                    std::int64_t seq, std::int64_t query_begin,
                                    std::int64_t num_queries) noexcept;

// Throws std::invalid_argument unless the kernels can run on `batch`: query starts begin at 0, do
// not decrease and end within num_tokens; lengths are within the bounds and the table's row; the
// ids of all blocks that `mask` lets some query see are in [0, num_blocks). Nothing of a sequence
// without queries is looked at, and no table entry that is not used.
// Cost: O(number of used blocks).
void check_batch(const AttentionBatch& batch, const AttentionMask& mask);

}  // namespace paged_kv::cpu
