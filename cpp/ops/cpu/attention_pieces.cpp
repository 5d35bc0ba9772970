// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/attention_pieces.h"

#include "paged_kv/math.h"

#include <algorithm>

namespace paged_kv::cpu {
namespace {

// The keys that some query of the piece sees.
KeyRange keys_of(const AttentionPiece& piece, const AttentionBatch& batch,
                 const AttentionMask& mask) {
  const std::int64_t seq_len = batch.seq_lens[piece.seq];
  const std::int64_t first_pos = batch.first_query_pos(piece.seq) + piece.query_begin;
  const std::int64_t begin = mask.visible(first_pos, seq_len).begin;
  const std::int64_t end = mask.visible(first_pos + piece.num_queries - 1, seq_len).end;
  return {begin, std::max(begin, end)};
}

[[nodiscard]] std::int64_t cost_of(const AttentionPiece& piece) noexcept {
  return piece.num_queries * (piece.keys.end - piece.keys.begin);
}

}  // namespace

std::int64_t kv_heads_per_tile(const PagedAttentionParams& params) {
  const bool is_nhd = params.key.head_stride < params.key.token_stride;
  if (!is_nhd) return 1;
  for (std::int64_t seq = 0; seq < params.batch.num_seqs(); ++seq) {
    if (params.batch.query_len(seq) > 1) return 1;
  }
  const std::int64_t fitting = max_tile_rows(params.group_size()) / params.group_size();
  return std::min(params.num_kv_heads, fitting);
}

void AttentionPieces::plan(const AttentionBatch& batch, const AttentionMask& mask,
                           std::int64_t group_size, std::int64_t num_head_blocks,
                           std::int64_t num_threads) {
  constexpr std::int64_t kPiecesPerThread = 4;
  pieces.clear();
  cut_tiles.clear();
  num_partials = max_cut_queries = 0;

  std::int64_t total_cost = 0;
  const std::int64_t max_queries = queries_per_tile(group_size);
  for (std::int64_t seq = 0; seq < batch.num_seqs(); ++seq) {
    const std::int64_t query_len = batch.query_len(seq);
    for (std::int64_t tile = ceil_div(query_len, max_queries) - 1; tile >= 0; --tile) {
      const std::int64_t query_begin = tile * max_queries;
      AttentionPiece piece{.seq = seq,
                           .query_begin = query_begin,
                           .num_queries = std::min(max_queries, query_len - query_begin),
                           .keys = {},
                           .partial = -1};
      piece.keys = keys_of(piece, batch, mask);
      total_cost += cost_of(piece);
      pieces.push_back(piece);
    }
  }
  if (num_threads == 1) return;

  const std::int64_t fair_cost = total_cost * num_head_blocks / (num_threads * kPiecesPerThread);
  const std::size_t num_tiles = pieces.size();
  for (std::size_t i = 0; i < num_tiles; ++i) {
    const AttentionPiece tile = pieces[i];
    const std::int64_t first_split = tile.keys.begin / kSplitKeys;
    const std::int64_t num_splits = ceil_div(tile.keys.end, kSplitKeys) - first_split;
    if (num_splits <= 1 || cost_of(tile) <= fair_cost) continue;
    max_cut_queries = std::max(max_cut_queries, tile.num_queries);
    cut_tiles.push_back({tile.seq, tile.query_begin, tile.num_queries, num_partials, num_splits});
    for (std::int64_t split = 0; split < num_splits; ++split) {
      AttentionPiece piece = tile;
      piece.keys.begin = std::max(tile.keys.begin, (first_split + split) * kSplitKeys);
      piece.keys.end = std::min(tile.keys.end, (first_split + split + 1) * kSplitKeys);
      piece.partial = num_partials++;
      if (split == 0) {
        pieces[i] = piece;
      } else {
        pieces.push_back(piece);
      }
    }
  }
}

}  // namespace paged_kv::cpu
