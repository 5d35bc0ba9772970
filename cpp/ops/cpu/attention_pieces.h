// SPDX-License-Identifier: Apache-2.0
//
// How the attention of one batch is cut into pieces of work for threads.
#pragma once

#include "ops/cpu/attention_tile.h"
#include "ops/cpu/paged_attention.h"

#include <cstdint>
#include <vector>

namespace paged_kv::cpu {

// A tile of queries against some of its keys. The kv heads are done in blocks, one work item each.
struct AttentionPiece {
  std::int64_t seq;
  std::int64_t query_begin;  // as in QueryTile
  std::int64_t num_queries;
  KeyRange keys;
  std::int64_t heads_per_item;
  std::int64_t first_item;
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

// Keeps its memory from one plan to the next.
class AttentionPieces {
 public:
  // Replaces what was there.
  //
  // A piece with few queries takes many kv heads, whose keys AttentionTile reads in strips, so that
  // memory is read nearly in the order in which blocks lie; fewer heads if that would leave threads
  // without work. A tile is cut if it is more than a fair part of the work of `num_threads`
  // threads. Within a sequence the last queries, which see the most keys, come first: then the
  // threads finish at about the same time. Cost: O(pieces).
  void plan(const PagedAttentionParams& params, std::int64_t num_threads);

  [[nodiscard]] std::int64_t num_items() const noexcept { return num_items_; }
  // The piece that an item is part of, and which heads of it. Cost: O(log(pieces)).
  [[nodiscard]] const AttentionPiece& piece_of(std::int64_t item) const;
  [[nodiscard]] QueryTile tile_of(const AttentionPiece& piece, std::int64_t item) const noexcept;

  [[nodiscard]] const std::vector<CutTile>& cut_tiles() const noexcept { return cut_tiles_; }
  [[nodiscard]] std::int64_t num_partials() const noexcept { return num_partials_; }
  [[nodiscard]] std::int64_t max_cut_queries() const noexcept { return max_cut_queries_; }

 private:
  void add_tiles(const PagedAttentionParams& params);
  // Cuts those whose items cost more.
  void cut(std::int64_t max_cost);
  void number_items();

  std::int64_t num_kv_heads_ = 0;
  std::int64_t num_items_ = 0;
  std::int64_t num_partials_ = 0;
  std::int64_t max_cut_queries_ = 0;
  std::vector<AttentionPiece> pieces_;  // by first_item
  std::vector<CutTile> cut_tiles_;
};

}  // namespace paged_kv::cpu
