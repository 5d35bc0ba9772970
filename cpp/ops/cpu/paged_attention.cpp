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

// Rows of the pieces of cut tiles: [num_partials, num_kv_heads, rows of a tile].
class PartialRows {
 public:
  PartialRows(const PagedAttentionParams& params, std::int64_t num_partials, Scratch& scratch)
      : num_kv_heads_(params.num_kv_heads),
        rows_per_tile_(queries_per_tile(params.group_size()) * params.group_size()),
        padded_size_(params.padded_head_size()) {
    const std::int64_t num_rows = num_partials * num_kv_heads_ * rows_per_tile_;
    ScratchCutter sizes(nullptr);
    take_from(sizes, num_rows);
    ScratchCutter cutter(scratch.reserve(sizes.num_bytes()));
    take_from(cutter, num_rows);
  }

  void store(std::int64_t partial, std::int64_t kv_head, const AttentionTile& tile) const {
    for (std::int64_t r = 0; r < tile.num_rows(); ++r) {
      const std::int64_t i = index(partial, kv_head, r);
      states_[i] = tile.row(r).state;
      std::copy_n(tile.row(r).output, padded_size_, outputs_ + i * padded_size_);
    }
  }

  [[nodiscard]] AttentionRow load(std::int64_t partial, std::int64_t kv_head,
                                  std::int64_t r) const noexcept {
    const std::int64_t i = index(partial, kv_head, r);
    return {states_[i], outputs_ + i * padded_size_};
  }

 private:
  void take_from(ScratchCutter& cutter, std::int64_t num_rows) {
    states_ = cutter.take<SoftmaxState>(num_rows);
    outputs_ = cutter.take<float>(num_rows * padded_size_);
  }
  [[nodiscard]] std::int64_t index(std::int64_t partial, std::int64_t kv_head,
                                   std::int64_t r) const noexcept {
    return (partial * num_kv_heads_ + kv_head) * rows_per_tile_ + r;
  }

  std::int64_t num_kv_heads_, rows_per_tile_, padded_size_;
  SoftmaxState* states_ = nullptr;
  float* outputs_ = nullptr;
};

// Row r of the queries from `query_begin` on of a sequence.
void write_row(const PagedAttentionParams& p, std::int64_t seq, std::int64_t query_begin,
               std::int64_t kv_head, std::int64_t r, const AttentionRow& row) {
  const std::int64_t token = p.batch.query_begin(seq) + query_begin + r / p.group_size();
  write_result(p, row, token, kv_head * p.group_size() + r % p.group_size());
}

void run_piece(const PagedAttentionParams& p, const AttentionPiece& piece, std::int64_t kv_head,
               const PartialRows& partials, AttentionTile& worker) {
  worker.run({piece.seq, kv_head, piece.query_begin, piece.num_queries}, piece.keys);
  if (!piece.is_whole()) return partials.store(piece.partial, kv_head, worker);
  for (std::int64_t r = 0; r < worker.num_rows(); ++r) {
    write_row(p, piece.seq, piece.query_begin, kv_head, r, worker.row(r));
  }
}

void join_cut_tile(const PagedAttentionParams& p, const CutTile& tile, std::int64_t kv_head,
                   const PartialRows& partials) {
  for (std::int64_t r = 0; r < tile.num_queries * p.group_size(); ++r) {
    AttentionRow row = partials.load(tile.first_partial, kv_head, r);
    for (std::int64_t i = 1; i < tile.num_partials; ++i) {
      join_rows(p, row, partials.load(tile.first_partial + i, kv_head, r));
    }
    write_row(p, tile.seq, tile.query_begin, kv_head, r, row);
  }
}

}  // namespace

void paged_attention(const PagedAttentionParams& params, const ThreadRunner& runner) {
  static thread_local CallMemory memory;
  const std::int64_t num_heads = params.num_kv_heads;
  const std::int64_t workers = num_workers(params, runner);
  AttentionPieces& work = memory.work;
  work.plan(params.batch, params.mask, params.group_size(), num_heads, workers);
  const PartialRows partials(params, work.num_partials, memory.partials);

  for_each_item(params, std::ssize(work.pieces) * num_heads, workers, runner, memory.workers,
                [&](AttentionTile& worker, std::int64_t item) {
                  const auto& piece = work.pieces[static_cast<std::size_t>(item / num_heads)];
                  run_piece(params, piece, item % num_heads, partials, worker);
                });
  parallel_for(runner, std::ssize(work.cut_tiles) * num_heads, 1,
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t i = begin; i < end; ++i) {
                   const auto& tile = work.cut_tiles[static_cast<std::size_t>(i / num_heads)];
                   join_cut_tile(params, tile, i % num_heads, partials);
                 }
               });
}

}  // namespace paged_kv::cpu
