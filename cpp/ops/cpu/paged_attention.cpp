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

// Rows of the pieces of cut tiles: [num_partials, num_head_blocks, rows of a tile].
class PartialRows {
 public:
  PartialRows(const AttentionPieces& work, std::int64_t query_heads_per_tile,
              std::int64_t num_head_blocks, std::int64_t padded_size, Scratch& scratch)
      : num_head_blocks_(num_head_blocks),
        rows_per_tile_(work.max_cut_queries * query_heads_per_tile),
        padded_size_(padded_size) {
    const std::int64_t num_rows = work.num_partials * num_head_blocks_ * rows_per_tile_;
    ScratchCutter sizes(nullptr);
    take_from(sizes, num_rows);
    ScratchCutter cutter(scratch.reserve(sizes.num_bytes()));
    take_from(cutter, num_rows);
  }

  void store(std::int64_t partial, std::int64_t head_block, const AttentionTile& tile) const {
    for (std::int64_t r = 0; r < tile.num_rows(); ++r) {
      const std::int64_t i = index(partial, head_block, r);
      states_[i] = tile.row(r).state;
      std::copy_n(tile.row(r).output, padded_size_, outputs_ + i * padded_size_);
    }
  }

  [[nodiscard]] AttentionRow load(std::int64_t partial, std::int64_t head_block,
                                  std::int64_t r) const noexcept {
    const std::int64_t i = index(partial, head_block, r);
    return {states_[i], outputs_ + i * padded_size_};
  }

 private:
  void take_from(ScratchCutter& cutter, std::int64_t num_rows) {
    states_ = cutter.take<SoftmaxState>(num_rows);
    outputs_ = cutter.take<float>(num_rows * padded_size_);
  }
  [[nodiscard]] std::int64_t index(std::int64_t partial, std::int64_t head_block,
                                   std::int64_t r) const noexcept {
    return (partial * num_head_blocks_ + head_block) * rows_per_tile_ + r;
  }

  std::int64_t num_head_blocks_, rows_per_tile_, padded_size_;
  SoftmaxState* states_ = nullptr;
  float* outputs_ = nullptr;
};

// One call: pieces x blocks of kv heads.
class Call {
 public:
  Call(const PagedAttentionParams& params, const ThreadRunner& runner, CallMemory& memory)
      : params_(params),
        group_size_(params.group_size()),
        heads_per_tile_(kv_heads_per_tile(params)),
        num_head_blocks_(ceil_div(params.num_kv_heads, heads_per_tile_)),
        num_workers_(num_workers(params, runner)),
        work_(planned(params, memory)),
        partials_(work_, heads_per_tile_ * group_size_, num_head_blocks_, params.padded_head_size(),
                  memory.partials) {}

  void run(const ThreadRunner& runner, Scratch& scratch) {
    for_each_item(params_, std::ssize(work_.pieces) * num_head_blocks_, num_workers_, runner,
                  scratch,
                  [this](AttentionTile& worker, std::int64_t item) { run_piece(worker, item); });
    parallel_for(runner, std::ssize(work_.cut_tiles) * num_head_blocks_, 1,
                 [this](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t item = begin; item < end; ++item) join_cut_tile(item);
                 });
  }

 private:
  const AttentionPieces& planned(const PagedAttentionParams& params, CallMemory& memory) const {
    memory.work.plan(params.batch, params.mask, group_size_, num_head_blocks_, num_workers_);
    return memory.work;
  }

  template <class Piece>
  [[nodiscard]] QueryTile tile_of(const Piece& piece, std::int64_t head_block) const noexcept {
    const std::int64_t begin = head_block * heads_per_tile_;
    const std::int64_t end = std::min(begin + heads_per_tile_, params_.num_kv_heads);
    return {piece.seq, begin, end - begin, piece.query_begin, piece.num_queries};
  }

  void run_piece(AttentionTile& worker, std::int64_t item) const {
    const auto& piece = work_.pieces[static_cast<std::size_t>(item / num_head_blocks_)];
    const std::int64_t head_block = item % num_head_blocks_;
    const QueryTile tile = tile_of(piece, head_block);
    worker.run(tile, piece.keys);
    if (!piece.is_whole()) return partials_.store(piece.partial, head_block, worker);
    for (std::int64_t r = 0; r < worker.num_rows(); ++r) write_row(tile, r, worker.row(r));
  }

  void join_cut_tile(std::int64_t item) const {
    const auto& cut = work_.cut_tiles[static_cast<std::size_t>(item / num_head_blocks_)];
    const std::int64_t head_block = item % num_head_blocks_;
    const QueryTile tile = tile_of(cut, head_block);
    for (std::int64_t r = 0; r < tile.num_rows(group_size_); ++r) {
      AttentionRow row = partials_.load(cut.first_partial, head_block, r);
      for (std::int64_t i = 1; i < cut.num_partials; ++i) {
        join_rows(params_, row, partials_.load(cut.first_partial + i, head_block, r));
      }
      write_row(tile, r, row);
    }
  }

  void write_row(const QueryTile& tile, std::int64_t r, const AttentionRow& row) const {
    const std::int64_t token = params_.batch.query_begin(tile.seq) + tile.query_of(r, group_size_);
    write_result(params_, row, token, tile.head_of(r, group_size_));
  }

  const PagedAttentionParams& params_;
  std::int64_t group_size_, heads_per_tile_, num_head_blocks_, num_workers_;
  const AttentionPieces& work_;
  PartialRows partials_;
};

}  // namespace

void paged_attention(const PagedAttentionParams& params, const ThreadRunner& runner) {
  static thread_local CallMemory memory;
  Call(params, runner, memory).run(runner, memory.workers);
}

}  // namespace paged_kv::cpu
