// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/paged_attention.h"

#include "ops/cpu/attention_pieces.h"
#include "ops/cpu/attention_result.h"
#include "ops/cpu/attention_tile.h"
#include "ops/cpu/attention_workers.h"

#include <algorithm>

namespace paged_kv::cpu {
namespace {

// What a call needs besides its arguments, kept by the calling thread.
struct CallMemory {
  AttentionPieces work;
  Scratch workers;
  Scratch partials;
};

// Rows of the pieces of cut tiles: [num_partials, num_heads, max_cut_queries].
class PartialRows {
 public:
  PartialRows(const PagedAttentionParams& params, const AttentionPieces& work, Scratch& scratch)
      : num_heads_(params.num_heads),
        max_queries_(work.max_cut_queries()),
        padded_size_(params.padded_head_size()) {
    const std::int64_t num_rows = work.num_partials() * num_heads_ * max_queries_;
    ScratchCutter sizes(nullptr);
    take_from(sizes, num_rows);
    ScratchCutter cutter(scratch.reserve(sizes.num_bytes()));
    take_from(cutter, num_rows);
  }

  // `query` counts from the tile's first.
  void store(std::int64_t partial, std::int64_t head, std::int64_t query,
             const AttentionRow& row) const {
    const std::int64_t i = index(partial, head, query);
    states_[i] = row.state;
    std::copy_n(row.output, padded_size_, outputs_ + i * padded_size_);
  }

  [[nodiscard]] AttentionRow load(std::int64_t partial, std::int64_t head,
                                  std::int64_t query) const noexcept {
    const std::int64_t i = index(partial, head, query);
    return {states_[i], outputs_ + i * padded_size_};
  }

 private:
  void take_from(ScratchCutter& cutter, std::int64_t num_rows) {
    states_ = cutter.take<SoftmaxState>(num_rows);
    outputs_ = cutter.take<float>(num_rows * padded_size_);
  }
  [[nodiscard]] std::int64_t index(std::int64_t partial, std::int64_t head,
                                   std::int64_t query) const noexcept {
    return (partial * num_heads_ + head) * max_queries_ + query;
  }

  std::int64_t num_heads_, max_queries_, padded_size_;
  SoftmaxState* states_ = nullptr;
  float* outputs_ = nullptr;
};

// One work item. `next_item` is for_each_item()'s.
template <class F>
void run_item(const PagedAttentionParams& params, const AttentionPieces& work,
              const PartialRows& partials, AttentionTile& worker, std::int64_t item,
              const F& next_item) {
  const AttentionPiece& piece = work.piece_of(item);
  const QueryTile tile = work.tile_of(piece, item);
  worker.run({tile, piece.keys}, [&]() -> AttentionWork {
    const std::int64_t next = next_item();
    if (next >= work.num_items()) return {};
    const AttentionPiece& next_piece = work.piece_of(next);
    return {work.tile_of(next_piece, next), next_piece.keys};
  });
  const std::int64_t first_token = params.batch.query_begin(tile.seq);
  for (std::int64_t r = 0; r < worker.num_rows(); ++r) {
    const std::int64_t query = tile.query_of(r, params.group_size());
    const std::int64_t head = tile.head_of(r, params.group_size());
    if (piece.is_whole()) {
      write_result(params, worker.row(r), first_token + query, head);
    } else {
      partials.store(piece.partial, head, query - tile.query_begin, worker.row(r));
    }
  }
}

// One head of a tile that was cut.
void join_cut_tile(const PagedAttentionParams& params, const CutTile& tile,
                   const PartialRows& partials, std::int64_t head) {
  const std::int64_t first_token = params.batch.query_begin(tile.seq) + tile.query_begin;
  for (std::int64_t query = 0; query < tile.num_queries; ++query) {
    AttentionRow row = partials.load(tile.first_partial, head, query);
    for (std::int64_t i = 1; i < tile.num_partials; ++i) {
      join_rows(params, row, partials.load(tile.first_partial + i, head, query));
    }
    write_result(params, row, first_token + query, head);
  }
}

}  // namespace

void paged_attention(const PagedAttentionParams& params, const ThreadRunner& runner) {
  static thread_local CallMemory memory;
  const std::int64_t workers = num_workers(params, runner);
  AttentionPieces& work = memory.work;
  work.plan(params, workers);
  const PartialRows partials(params, work, memory.partials);

  for_each_item(params, work.num_items(), workers, runner, memory.workers,
                [&](AttentionTile& worker, std::int64_t item, const auto& next_item) {
                  run_item(params, work, partials, worker, item, next_item);
                });
  const auto& cut_tiles = work.cut_tiles();
  parallel_for(runner, std::ssize(cut_tiles) * params.num_heads, 1,
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t i = begin; i < end; ++i) {
                   const auto& tile = cut_tiles[static_cast<std::size_t>(i / params.num_heads)];
                   join_cut_tile(params, tile, partials, i % params.num_heads);
                 }
               });
}

}  // namespace paged_kv::cpu
