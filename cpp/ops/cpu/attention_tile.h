// SPDX-License-Identifier: Apache-2.0
//
// The core of all attention kernels: one tile of queries, of some kv heads, against a range of
// keys, with an online softmax (arXiv 2205.14135) over tiles of keys.
#pragma once

#include "ops/cpu/cache_rows.h"
#include "ops/cpu/paged_attention.h"
#include "ops/cpu/scratch.h"

#include <cstdint>

namespace paged_kv::cpu {

// Keys of a sequence are attended to in splits that begin at multiples of this, each on its own
// (arXiv 2311.01282), and the results are joined in order. So who does which split, one thread or
// many, changes no bit.
inline constexpr std::int64_t kSplitKeys = kPartitionSize;
// Rows (query, head) of a tile, unless a single query has more heads in its group than that.
inline constexpr std::int64_t kTileRows = 128;

static_assert(kSplitKeys % kTileKeys == 0);

// The queries [query_begin, query_begin + num_queries) of a sequence, all heads of some kv heads.
struct QueryTile {
  std::int64_t seq;
  std::int64_t kv_head_begin;
  std::int64_t num_kv_heads;
  std::int64_t query_begin;  // 0 = first of the sequence in this step
  std::int64_t num_queries;

  // Rows come kv head by kv head, query by query, head by head.
  [[nodiscard]] std::int64_t num_rows(std::int64_t group_size) const noexcept {
    return num_kv_heads * num_queries * group_size;
  }
  [[nodiscard]] std::int64_t query_of(std::int64_t row, std::int64_t group_size) const noexcept {
    return query_begin + row / group_size % num_queries;
  }
  [[nodiscard]] std::int64_t head_of(std::int64_t row, std::int64_t group_size) const noexcept {
    return (kv_head_begin + row / (num_queries * group_size)) * group_size + row % group_size;
  }
};

// At most so many rows has a tile.
[[nodiscard]] inline std::int64_t max_tile_rows(std::int64_t group_size) noexcept {
  return group_size > kTileRows ? group_size : kTileRows;
}

// Most queries of a tile of one kv head.
[[nodiscard]] inline std::int64_t queries_per_tile(std::int64_t group_size) noexcept {
  return group_size >= kTileRows ? 1 : kTileRows / group_size;
}

// What a row has gathered: `output` is the sum of exp(logit - state.max) * value over the keys
// seen, padded_head_size() elements. Without keys, state.sum is 0 and state.max -inf.
struct AttentionRow {
  SoftmaxState state;
  float* output;

  [[nodiscard]] bool has_keys() const noexcept { return state.sum != 0; }
};

// row becomes what it is together with `other`, whose keys follow.
void join_rows(const PagedAttentionParams& params, AttentionRow& row, const AttentionRow& other);

// A tile and the keys that it attends to; there may be none.
struct AttentionWork {
  QueryTile tile;
  KeyRange keys;
};

// Works on tiles one after the other; holds the scratch of one thread and the params of the call.
class AttentionTile {
 public:
  // Takes O((rows + kTileKeys) * head_size) floats from `scratch`, or counts them only.
  AttentionTile(const PagedAttentionParams& params, ScratchCutter& scratch);

  // Attends to the visible keys among those of `work`, split by split. When it comes to the last of
  // them, it asks `next_work` what will be run after it, to fetch its first keys meanwhile.
  template <class F>
  void run(const AttentionWork& work, F next_work) {
    next_work_ = {[](void* f) { return (*static_cast<F*>(f))(); }, &next_work};
    run(work);
    next_work_ = {};
  }

  // Results of run().
  [[nodiscard]] std::int64_t num_rows() const noexcept { return num_rows_; }
  [[nodiscard]] const AttentionRow& row(std::int64_t r) const noexcept { return rows_[r]; }

 private:
  // See run().
  struct NextWork {
    AttentionWork (*get)(void* context);
    void* context;
  };

  struct Query {
    KeyRange visible;  // positions
    KeyRange columns;  // of the current tile of keys, those that add something
    std::int64_t query_pos;
    std::int64_t head;
    std::int64_t sparse_offset;
    float max;  // of the logits of the current tile of keys
  };

  // Some columns of a tile, of some of its kv heads (0 = first of the tile).
  struct Strip {
    KeyRange columns;
    std::int64_t head_begin;
    std::int64_t head_end;

    [[nodiscard]] std::int64_t num_heads() const noexcept { return head_end - head_begin; }
  };

  // Rows of the tile's head.
  [[nodiscard]] std::int64_t first_row(std::int64_t head) const noexcept {
    return head * tile_.num_queries * group_size_;
  }
  [[nodiscard]] float* logits(std::int64_t r) noexcept { return logits_ + r * kTileKeys; }

  void run(const AttentionWork& work);
  void begin_queries(const QueryTile& tile, KeyRange keys);
  void clear(AttentionRow* rows) const noexcept;
  // All tiles of keys of one split, into `rows`.
  void run_split(KeyRange split, AttentionRow* rows);
  // One tile of keys: all products, then the softmax of every row, then the values.
  void run_tile(std::int64_t tile_begin, AttentionRow* rows);
  void multiply_strips(KeyRange columns);
  void add_strips(std::int64_t tile_begin, KeyRange columns, AttentionRow* rows);
  // What is to be fetched ahead: see CacheRows.
  void add_first_lines(const CacheRows& side, const Strip& strip, MemoryRuns& runs) const;
  void add_other_lines(const CacheRows& side, const Strip& strip, MemoryRuns& runs) const;
  // Those that come after a tile of keys: of the next one, or of the next work (part of them, if
  // that has more kv heads).
  void add_first_lines_after(std::int64_t tile_begin, MemoryRuns& runs);
  // Those of the tile of keys that is turned to next.
  void add_first_lines_of(const QueryTile& tile, std::int64_t tile_begin, KeyRange columns,
                          MemoryRuns& runs);
  [[nodiscard]] Strip first_strip(KeyRange columns, std::int64_t num_kv_heads) const noexcept;
  // Its columns are empty after the last one.
  [[nodiscard]] Strip strip_after(const Strip& strip, KeyRange columns) const noexcept;
  void set_columns(std::int64_t tile_begin) noexcept;
  // Those that all rows [first, last) see; may be empty.
  [[nodiscard]] KeyRange common_columns(std::int64_t first, std::int64_t last) const noexcept;
  void multiply_keys(TokenRows keys, std::int64_t first, std::int64_t last);
  void softmax(std::int64_t tile_begin, float scale, std::int64_t first, std::int64_t last,
               AttentionRow* rows);
  // Returns the largest logit that is left.
  float mask_sparse(const Query& query, std::int64_t tile_begin, float* logits) const;
  // Adds the columns [values.begin, values.end) only.
  void add_values(const TokenRows& values, std::int64_t tile_begin, std::int64_t first,
                  std::int64_t last, AttentionRow* rows);
  // Rows [first, last), which all see the columns.
  void add_to_rows(TokenRows values, KeyRange columns, std::int64_t first, std::int64_t last,
                   AttentionRow* rows);
  void add_to_few_rows(const TokenRows& values, std::int64_t first, std::int64_t last,
                       AttentionRow* rows);
  void add_to_sparse_row(const TokenRows& values, std::int64_t tile_begin, std::int64_t r,
                         AttentionRow* rows);

  const PagedAttentionParams& params_;
  const AttentionKernels& kernels_;
  std::int64_t group_size_;
  std::int64_t padded_size_;
  std::int64_t strip_keys_;  // columns of a strip of several kv heads; 0: strips have one head
  NextWork next_work_{};
  QueryTile tile_{};
  std::int64_t num_rows_ = 0;
  KeyRange seen_{};     // positions that some row sees
  Query* queries_;      // [rows]
  AttentionRow* rows_;  // [rows], of all splits so far
  AttentionRow* split_rows_;
  float* query_;      // [rows, padded_size]
  float* logits_;     // [rows, kTileKeys], then the weights
  MemoryRun* ahead_;  // [kTileKeys], what the kernels fetch
  CacheRows keys_, values_;
};

}  // namespace paged_kv::cpu
