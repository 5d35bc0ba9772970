// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/attention_tile.h"

#include "ops/cpu/attention_micro.h"
#include "ops/cpu/float16.h"
#include "ops/cpu/vec.h"
#include "paged_kv/math.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

namespace paged_kv::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <class T>
void convert_row(const T* source, std::int64_t stride, std::int64_t size, float* target) {
  if (stride == 1) {  // a loop of its own, so that it is vectorised
    for (std::int64_t d = 0; d < size; ++d) target[d] = to_float(source[d]);
  } else {
    for (std::int64_t d = 0; d < size; ++d) target[d] = to_float(source[d * stride]);
  }
}

// The largest of a row's logits; -inf if none is visible. max() passes over NaN, so a row of
// nothing but NaN would look like one without keys, and its result would be a clean zero.
[[nodiscard]] float max_or_nan(const float* logits) {
  Vec max_vec = load(logits);
  for (std::int64_t k = kLanes; k < kTileKeys; k += kLanes) {
    max_vec = max(max_vec, load(logits + k));
  }
  const float result = max_lanes(max_vec);
  const auto is_nan = [](float logit) { return std::isnan(logit); };
  return result == -kInfinity && std::any_of(logits, logits + kTileKeys, is_nan)
             ? std::numeric_limits<float>::quiet_NaN()
             : result;
}

[[nodiscard]] bool equal(KeyRange a, KeyRange b) { return a.begin == b.begin && a.end == b.end; }

}  // namespace

template <class T>
AttentionTile<T>::AttentionTile(const PagedAttentionParams<T>& params)
    : params_(params),
      group_size_(params.group_size()),
      padded_size_(round_up<std::int64_t>(params.head_size, kLanes)),
      rows_(index(queries_per_tile(group_size_) * group_size_)),
      query_(rows_.size() * index(padded_size_)),
      output_(rows_.size() * index(padded_size_)),
      logits_(rows_.size() * index(kTileKeys)),
      key_(index(kTileKeys * padded_size_)),
      value_(index(kTileKeys * padded_size_)),
      key_rows_(index(kTileKeys)),
      value_rows_(index(kTileKeys)) {}

template <class T>
void AttentionTile<T>::run(const QueryTile& tile, KeyRange keys, bool use_sinks) {
  begin_rows(tile, keys, use_sinks);
  for (std::int64_t tile_begin = keys.begin; tile_begin < keys.end; tile_begin += kTileKeys) {
    const KeyRange columns = set_columns(tile_begin);
    if (columns.empty()) continue;
    load_tile(tile, tile_begin, columns);
    multiply_keys(columns);
    for (std::int64_t row = 0; row < num_rows_; ++row) softmax_row(row, tile_begin);
    add_values(tile_begin);
  }
}

template <class T>
void AttentionTile<T>::begin_rows(const QueryTile& tile, KeyRange keys, bool use_sinks) {
  const auto& p = params_;
  num_rows_ = tile.num_queries * group_size_;
  std::fill_n(output_.begin(), num_rows_ * padded_size_, 0.0f);
  for (std::int64_t r = 0; r < num_rows_; ++r) {
    Row& row = rows_[index(r)];
    const std::int64_t query = tile.query_begin + r / group_size_;
    row.head = tile.kv_head * group_size_ + r % group_size_;
    row.query_pos = p.batch.first_query_pos(tile.seq) + query;
    row.visible = p.mask.visible(row.query_pos, p.batch.seq_lens[tile.seq]);
    row.visible = {std::max(row.visible.begin, keys.begin), std::min(row.visible.end, keys.end)};
    row.sparse_offset = p.sparsity.enabled()
                            ? p.sparsity.offset(row.head, p.num_heads, tile.kv_head, p.num_kv_heads)
                            : 0;
    row.max = use_sinks ? p.sinks[row.head * p.sinks_stride] : -kInfinity;
    row.sum = row.max > -kInfinity ? 1.0f : 0.0f;
    row.has_keys = false;
    const T* source = p.query + (p.batch.query_begin(tile.seq) + query) * p.query_token_stride +
                      row.head * p.query_head_stride;
    convert_row(source, 1, p.head_size, query_.data() + r * padded_size_);
  }
}

template <class T>
KeyRange AttentionTile<T>::set_columns(std::int64_t tile_begin) {
  KeyRange all{kTileKeys, 0};
  for (std::int64_t r = 0; r < num_rows_; ++r) {
    Row& row = rows_[index(r)];
    row.columns = {std::clamp<std::int64_t>(row.visible.begin - tile_begin, 0, kTileKeys),
                   std::clamp<std::int64_t>(row.visible.end - tile_begin, 0, kTileKeys)};
    if (row.columns.empty()) continue;
    all = {std::min(all.begin, row.columns.begin), std::max(all.end, row.columns.end)};
  }
  return all;
}

// Makes key_rows_ and value_rows_ of `columns` point to float32 rows of padded_size_ elements:
// into the cache where it has that form, else into a converted copy.
template <class T>
void AttentionTile<T>::load_tile(const QueryTile& tile, std::int64_t tile_begin, KeyRange columns) {
  const auto& c = params_.cache;
  const std::int64_t size = params_.head_size;
  const bool whole_vectors = std::is_same_v<T, float> && size == padded_size_;
  const bool key_in_place = whole_vectors && c.key_dim_stride == 1 && c.key_chunk_size == size;
  const bool value_in_place = whole_vectors && c.value_dim_stride == 1;

  for (std::int64_t k = columns.begin; k < columns.end; ++k) {
    const std::int64_t pos = tile_begin + k;
    const std::int64_t block = params_.batch.block_tables(tile.seq, pos / params_.batch.block_size);
    const std::int64_t offset = pos % params_.batch.block_size;
    const T* key = c.key + block * c.key_block_stride + offset * c.key_token_stride +
                   tile.kv_head * c.key_head_stride;
    const T* value = c.value + block * c.value_block_stride + offset * c.value_token_stride +
                     tile.kv_head * c.value_head_stride;

    float* key_copy = key_.data() + k * padded_size_;
    float* value_copy = value_.data() + k * padded_size_;
    key_rows_[index(k)] = key_copy;
    value_rows_[index(k)] = value_copy;
    if (key_in_place) {
      key_rows_[index(k)] = reinterpret_cast<const float*>(key);
    } else {
      for (std::int64_t d = 0; d < size; d += c.key_chunk_size) {
        convert_row(key + d / c.key_chunk_size * c.key_chunk_stride, c.key_dim_stride,
                    c.key_chunk_size, key_copy + d);
      }
    }
    if (value_in_place) {
      value_rows_[index(k)] = reinterpret_cast<const float*>(value);
    } else {
      convert_row(value, c.value_dim_stride, size, value_copy);
    }
  }
}

template <class T>
void AttentionTile<T>::multiply_keys(KeyRange columns) {
  for_row_groups(num_rows_, [&]<int kRows>(std::int64_t first) {
    multiply_keys_rows<kRows>(query_.data() + first * padded_size_, padded_size_, key_rows_.data(),
                              columns.begin, columns.end, padded_size_, logits(first), kTileKeys);
  });
}

// Dot products -> logits, without the mask. Columns that are not visible hold anything.
template <class T>
void AttentionTile<T>::transform_logits(const Row& row, float* logits,
                                        std::int64_t tile_begin) const {
  const auto& p = params_;
  const float slope = p.alibi_slopes != nullptr ? p.alibi_slopes[row.head * p.alibi_stride] : 0.0f;
  const auto distance = static_cast<float>(tile_begin - row.query_pos);
  constexpr Vec kIota = {0, 1, 2, 3, 4, 5, 6, 7};
  for (std::int64_t k = 0; k < kTileKeys; k += kLanes) {
    Vec logit = load(logits + k) * p.scale;
    if (p.softcap > 0) logit = tanh(logit * (1.0f / p.softcap)) * p.softcap;
    if (slope != 0) logit += (kIota + (distance + static_cast<float>(k))) * slope;
    store(logits + k, logit);
  }
  std::fill(logits, logits + row.columns.begin, -kInfinity);
  std::fill(logits + row.columns.end, logits + kTileKeys, -kInfinity);
  if (!p.sparsity.enabled()) return;
  for (std::int64_t k = row.columns.begin; k < row.columns.end; ++k) {
    if (!p.sparsity.visible(tile_begin + k, row.query_pos, row.sparse_offset)) {
      logits[k] = -kInfinity;
    }
  }
}

template <class T>
void AttentionTile<T>::softmax_row(std::int64_t row_idx, std::int64_t tile_begin) {
  Row& row = rows_[index(row_idx)];
  if (row.columns.empty()) return;
  float* logits = this->logits(row_idx);
  transform_logits(row, logits, tile_begin);

  const float tile_max = max_or_nan(logits);
  if (tile_max == -kInfinity) {  // nothing to add, and -inf - -inf would be NaN
    row.columns = {0, 0};
    return;
  }
  row.has_keys = true;
  const float old_max = row.max;
  row.max = std::max(tile_max, old_max);  // in this order NaN in tile_max stays

  Vec sums{};
  for (std::int64_t k = 0; k < kTileKeys; k += kLanes) {
    const Vec weight = exp(load(logits + k) - row.max);
    store(logits + k, weight);
    sums += weight;
  }
  if (row.max != old_max) {
    const float rescale = exp(broadcast(old_max - row.max))[0];
    row.sum *= rescale;
    float* output = this->output(row_idx);
    for (std::int64_t d = 0; d < padded_size_; d += kLanes) {
      store(output + d, load(output + d) * rescale);
    }
  }
  row.sum += sum_lanes(sums);
}

// A column that a row does not see is left out rather than given weight 0: 0 * NaN is NaN.
template <class T>
void AttentionTile<T>::add_values(std::int64_t tile_begin) {
  for (std::int64_t first = 0; first < num_rows_;) {
    const KeyRange columns = rows_[index(first)].columns;
    if (params_.sparsity.enabled()) {
      add_values_sparse(first++, tile_begin);
      continue;
    }
    std::int64_t last = first + 1;
    while (last < num_rows_ && equal(rows_[index(last)].columns, columns)) ++last;
    if (!columns.empty()) {
      for_row_groups(last - first, [&]<int kRows>(std::int64_t row) {
        add_values_rows<kRows>(logits(first + row), kTileKeys, value_rows_.data(), columns.begin,
                               columns.end, padded_size_, output(first + row), padded_size_);
      });
    }
    first = last;
  }
}

template <class T>
void AttentionTile<T>::add_values_sparse(std::int64_t row_idx, std::int64_t tile_begin) {
  const Row& row = rows_[index(row_idx)];
  for (std::int64_t k = row.columns.begin; k < row.columns.end; ++k) {
    if (!params_.sparsity.visible(tile_begin + k, row.query_pos, row.sparse_offset)) continue;
    add_values_rows<1>(logits(row_idx), kTileKeys, value_rows_.data(), k, k + 1, padded_size_,
                       output(row_idx), padded_size_);
  }
}

template <class T>
float AttentionTile<T>::log_sum_exp(std::int64_t row_idx) const noexcept {
  const Row& row = rows_[index(row_idx)];
  return row.has_keys ? row.max + std::log(row.sum) : -kInfinity;
}

template <class T>
void AttentionTile<T>::write_output(std::int64_t row_idx, T* out) const noexcept {
  const Row& row = rows_[index(row_idx)];
  const float* output = output_.data() + row_idx * padded_size_;
  for (std::int64_t d = 0; d < params_.head_size; ++d) {
    out[d] = to<T>(row.has_keys ? output[d] / row.sum : 0.0f);
  }
}

template class AttentionTile<float>;
template class AttentionTile<Half>;
template class AttentionTile<BFloat16>;

}  // namespace paged_kv::cpu
