// SPDX-License-Identifier: Apache-2.0
//
// The core of all attention kernels: one tile of queries of one kv head against a range of keys,
// with an online softmax (arXiv 2205.14135) over tiles of keys.
#pragma once

#include "ops/cpu/paged_attention.h"

#include <cstdint>
#include <vector>

namespace paged_kv::cpu {

// Keys handled at a time. Their tiles begin at multiples of it in the sequence, whoever asks, so
// that the order of all sums depends on positions alone.
inline constexpr std::int64_t kTileKeys = 64;
// Rows (query, head) of a tile, unless a single query has more heads in its group than that.
inline constexpr std::int64_t kTileRows = 64;

static_assert(kPartitionSize % kTileKeys == 0);

// The queries [query_begin, query_begin + num_queries) of a sequence, all heads of one kv head.
struct QueryTile {
  std::int64_t seq;
  std::int64_t kv_head;
  std::int64_t query_begin;  // 0 = first of the sequence in this step
  std::int64_t num_queries;  // at most queries_per_tile()
};

[[nodiscard]] inline std::int64_t queries_per_tile(std::int64_t group_size) noexcept {
  return group_size >= kTileRows ? 1 : kTileRows / group_size;
}

// Works on tiles one after the other; holds the scratch of one thread and the params of the call.
// Row r of a tile is query r / group_size, head kv_head * group_size + r % group_size.
template <class T>
class AttentionTile {
 public:
  // Allocates O((rows + kTileKeys) * head_size) floats.
  explicit AttentionTile(const PagedAttentionParams<T>& params);

  // Attends to the visible keys in `keys`; keys.begin is a multiple of kTileKeys. With
  // `use_sinks`, each head's sink is one more logit.
  void run(const QueryTile& tile, KeyRange keys, bool use_sinks);

  // Results of run(), row by row.
  [[nodiscard]] std::int64_t num_rows() const noexcept { return num_rows_; }
  // The largest logit; -inf without visible keys.
  [[nodiscard]] float max_logit(std::int64_t row) const noexcept { return rows_[index(row)].max; }
  // Sum of exp(logit - max_logit).
  [[nodiscard]] float exp_sum(std::int64_t row) const noexcept { return rows_[index(row)].sum; }
  // Log of the sum of exp(logit); -inf without visible keys.
  [[nodiscard]] float log_sum_exp(std::int64_t row) const noexcept;
  // Writes the weighted mean of the values, head_size elements; zeros without visible keys.
  void write_output(std::int64_t row, T* out) const noexcept;

 private:
  struct Row {
    KeyRange visible;  // positions
    KeyRange columns;  // of the current tile of keys, those that are visible
    std::int64_t query_pos;
    std::int64_t head;
    std::int64_t sparse_offset;
    float max;
    float sum;
    bool has_keys;  // saw a logit above -inf
  };

  [[nodiscard]] static std::size_t index(std::int64_t i) noexcept {
    return static_cast<std::size_t>(i);
  }
  [[nodiscard]] float* logits(std::int64_t row) noexcept {
    return logits_.data() + row * kTileKeys;
  }
  [[nodiscard]] float* output(std::int64_t row) noexcept {
    return output_.data() + row * padded_size_;
  }

  void begin_rows(const QueryTile& tile, KeyRange keys, bool use_sinks);
  // Sets each row's columns; returns the columns that some row sees.
  KeyRange set_columns(std::int64_t tile_begin);
  void load_tile(const QueryTile& tile, std::int64_t tile_begin, KeyRange columns);
  void multiply_keys(KeyRange columns);
  // Turns a row's logits into unnormalised probabilities and rescales its sum and output.
  void softmax_row(std::int64_t row_idx, std::int64_t tile_begin);
  void transform_logits(const Row& row, float* logits, std::int64_t tile_begin) const;
  void add_values(std::int64_t tile_begin);
  void add_values_sparse(std::int64_t row_idx, std::int64_t tile_begin);

  const PagedAttentionParams<T>& params_;
  std::int64_t group_size_;
  std::int64_t padded_size_;  // head_size rounded up to whole vectors; the padding holds zeros
  std::int64_t num_rows_ = 0;
  std::vector<Row> rows_;
  std::vector<float> query_;   // [rows, padded_size]
  std::vector<float> output_;  // [rows, padded_size], not yet divided by the sum
  std::vector<float> logits_;  // [rows, kTileKeys], then the probabilities
  std::vector<float> key_;     // [kTileKeys, padded_size], unless the cache is used in place
  std::vector<float> value_;   // likewise
  std::vector<const float*> key_rows_;    // [kTileKeys], into key_ or the cache
  std::vector<const float*> value_rows_;  // likewise
};

}  // namespace paged_kv::cpu
