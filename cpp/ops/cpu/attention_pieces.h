// SPDX-License-Identifier: Apache-2.0
//
// How the attention of one batch is cut into pieces of work for threads.
#pragma once

#include "ops/cpu/attention_batch.h"
#include "ops/cpu/attention_tile.h"

#include <cstdint>
#include <vector>

namespace paged_kv::cpu {

// A tile of queries against some of its keys, for each block of kv heads.
struct AttentionPiece {
  std::int64_t seq;
  std::int64_t query_begin;  // as in QueryTile
  std::int64_t num_queries;
  KeyRange keys;
  std::int64_t partial;  // index among the pieces of cut tiles; -1: the piece is the whole tile

  [[nodiscard]] bool is_whole() const noexcept { return partial < 0; }
};

// A tile whose keys are cut into pieces, one a split.
struct CutTile {
  std::int64_t seq;
  std::int64_t query_begin;
  std::int64_t num_queries;
  std::int64_t first_partial;
  std::int64_t num_partials;
};

// How many kv heads a tile has. Where the heads of a token lie side by side (nhd), a decode step
// takes many of them token by token, so that each page of memory is visited once.
[[nodiscard]] std::int64_t kv_heads_per_tile(const PagedAttentionParams& params);

struct AttentionPieces {
  std::vector<AttentionPiece> pieces;
  std::vector<CutTile> cut_tiles;
  std::int64_t num_partials = 0;
  std::int64_t max_cut_queries = 0;  // of a cut tile

  // Replaces what was there. A tile is cut if it is more than a fair part of the work of
  // `num_threads` threads, where each piece is done for `num_head_blocks`. Within a sequence the
  // last queries, which see the most keys, come first: then the threads finish at about the same
  // time. Cost: O(pieces).
  void plan(const AttentionBatch& batch, const AttentionMask& mask, std::int64_t group_size,
            std::int64_t num_head_blocks, std::int64_t num_threads);
};

}  // namespace paged_kv::cpu
