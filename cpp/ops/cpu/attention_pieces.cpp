// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/attention_pieces.h"

#include "paged_kv/math.h"

#include <algorithm>

namespace paged_kv::cpu {
namespace {

// Work items for each thread: enough that the last to finish is not much later than the first.
// Heads are divided for fewer of them than keys are, since one head's part of a block is less
// memory in order.
constexpr std::int64_t kItemsPerThread = 4;
constexpr std::int64_t kCutItemsPerThread = 16;

// Of all its kv heads, in units that only compare.
[[nodiscard]] std::int64_t cost_of(const AttentionPiece& piece) noexcept {
  return piece.num_queries * (piece.keys.end - piece.keys.begin);
}

[[nodiscard]] std::int64_t num_splits(const AttentionPiece& piece) noexcept {
  return ceil_div(piece.keys.end, kSplitKeys) - piece.keys.begin / kSplitKeys;
}

}  // namespace

void AttentionPieces::plan(const PagedAttentionParams& params, std::int64_t num_threads) {
  num_kv_heads_ = params.num_kv_heads;
  num_partials_ = max_cut_queries_ = 0;
  cut_tiles_.clear();
  add_tiles(params);

  std::int64_t total_cost = 0, total_splits = 0;
  for (const AttentionPiece& tile : pieces_) {
    total_cost += cost_of(tile);
    total_splits += num_splits(tile);
  }
  const std::int64_t wanted_items = num_threads == 1 ? 1 : num_threads * kItemsPerThread;
  const std::int64_t head_blocks =
      std::min(ceil_div(wanted_items, std::max<std::int64_t>(total_splits, 1)), num_kv_heads_);
  for (AttentionPiece& tile : pieces_) {
    const std::int64_t rows_per_head = tile.num_queries * params.group_size();
    const std::int64_t fitting = std::max<std::int64_t>(1, kTileRows / rows_per_head);
    tile.heads_per_item = std::min(fitting, ceil_div(num_kv_heads_, head_blocks));
  }
  if (num_threads > 1) cut(total_cost * num_kv_heads_ / (num_threads * kCutItemsPerThread));
  number_items();
}

void AttentionPieces::add_tiles(const PagedAttentionParams& params) {
  pieces_.clear();
  const std::int64_t max_queries = queries_per_tile(params.group_size());
  for (std::int64_t seq = 0; seq < params.batch.num_seqs(); ++seq) {
    const std::int64_t query_len = params.batch.query_len(seq);
    for (std::int64_t i = ceil_div(query_len, max_queries) - 1; i >= 0; --i) {
      AttentionPiece tile{};
      tile.seq = seq;
      tile.query_begin = i * max_queries;
      tile.num_queries = std::min(max_queries, query_len - tile.query_begin);
      tile.keys = visible_keys(params.batch, params.mask, seq, tile.query_begin, tile.num_queries);
      tile.partial = -1;
      pieces_.push_back(tile);
    }
  }
}

void AttentionPieces::cut(std::int64_t max_cost) {
  const std::size_t num_tiles = pieces_.size();
  for (std::size_t i = 0; i < num_tiles; ++i) {
    const AttentionPiece tile = pieces_[i];
    const std::int64_t num_pieces = num_splits(tile);
    if (num_pieces <= 1 || cost_of(tile) * tile.heads_per_item <= max_cost) continue;
    max_cut_queries_ = std::max(max_cut_queries_, tile.num_queries);
    cut_tiles_.push_back({tile.seq, tile.query_begin, tile.num_queries, num_partials_, num_pieces});
    const std::int64_t first_split = tile.keys.begin / kSplitKeys;
    for (std::int64_t split = first_split; split < first_split + num_pieces; ++split) {
      AttentionPiece piece = tile;
      piece.keys.begin = std::max(tile.keys.begin, split * kSplitKeys);
      piece.keys.end = std::min(tile.keys.end, (split + 1) * kSplitKeys);
      piece.partial = num_partials_++;
      if (split == first_split) {
        pieces_[i] = piece;
      } else {
        pieces_.push_back(piece);
      }
    }
  }
}

void AttentionPieces::number_items() {
  num_items_ = 0;
  for (AttentionPiece& piece : pieces_) {
    piece.first_item = num_items_;
    num_items_ += ceil_div(num_kv_heads_, piece.heads_per_item);
  }
}

const AttentionPiece& AttentionPieces::piece_of(std::int64_t item) const {
  const auto next = std::ranges::upper_bound(pieces_, item, {}, &AttentionPiece::first_item);
  return *(next - 1);
}

QueryTile AttentionPieces::tile_of(const AttentionPiece& piece, std::int64_t item) const noexcept {
  const std::int64_t begin = (item - piece.first_item) * piece.heads_per_item;
  const std::int64_t end = std::min(begin + piece.heads_per_item, num_kv_heads_);
  return {piece.seq, begin, end - begin, piece.query_begin, piece.num_queries};
}

}  // namespace paged_kv::cpu
