// SPDX-License-Identifier: Apache-2.0
//
// The two inner products of attention on float32 rows. kRows queries share each load of a key or
// value; how many are taken together does not change any result, since the sums of one row run in
// the same order in all instantiations.
#pragma once

#include "ops/cpu/vec.h"

#include <algorithm>
#include <cstdint>

namespace paged_kv::cpu {

// logits[r * logits_stride + k] = query row r . key row k, for k in [begin, end).
// `size` is a multiple of kLanes.
template <int kRows, int kKeys>
void multiply_keys_block(const float* query, std::int64_t query_stride, const float* const* keys,
                         std::int64_t size, float* logits, std::int64_t logits_stride) {
  Vec sums[kRows][kKeys] = {};
  for (std::int64_t d = 0; d < size; d += kLanes) {
    Vec key[kKeys];
    for (int k = 0; k < kKeys; ++k) key[k] = load(keys[k] + d);
    for (int r = 0; r < kRows; ++r) {
      const Vec q = load(query + r * query_stride + d);
      for (int k = 0; k < kKeys; ++k) sums[r][k] += q * key[k];
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int k = 0; k < kKeys; ++k) logits[r * logits_stride + k] = sum_lanes(sums[r][k]);
  }
}

template <int kRows>
void multiply_keys_rows(const float* query, std::int64_t query_stride, const float* const* keys,
                        std::int64_t begin, std::int64_t end, std::int64_t size, float* logits,
                        std::int64_t logits_stride) {
  constexpr int kKeys = kRows == 1 ? 4 : kRows == 2 ? 2 : 1;  // enough independent sums
  std::int64_t k = begin;
  for (; k + kKeys <= end; k += kKeys) {
    multiply_keys_block<kRows, kKeys>(query, query_stride, keys + k, size, logits + k,
                                      logits_stride);
  }
  for (; k < end; ++k) {
    multiply_keys_block<kRows, 1>(query, query_stride, keys + k, size, logits + k, logits_stride);
  }
}

// output[r * output_stride + d] += sum over k in [begin, end), ascending, of
// weights[r * weights_stride + k] * values[k][d], for kVecs * kLanes elements d.
template <int kRows, int kVecs>
void add_values_block(const float* weights, std::int64_t weights_stride, const float* const* values,
                      std::int64_t begin, std::int64_t end, std::int64_t d, float* output,
                      std::int64_t output_stride) {
  Vec sums[kRows][kVecs];
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kVecs; ++i) sums[r][i] = load(output + r * output_stride + d + i * kLanes);
  }
  for (std::int64_t k = begin; k < end; ++k) {
    Vec value[kVecs];
    for (int i = 0; i < kVecs; ++i) value[i] = load(values[k] + d + i * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Vec weight = broadcast(weights[r * weights_stride + k]);
      for (int i = 0; i < kVecs; ++i) sums[r][i] += weight * value[i];
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kVecs; ++i) store(output + r * output_stride + d + i * kLanes, sums[r][i]);
  }
}

template <int kRows>
void add_values_rows(const float* weights, std::int64_t weights_stride, const float* const* values,
                     std::int64_t begin, std::int64_t end, std::int64_t size, float* output,
                     std::int64_t output_stride) {
  constexpr int kVecs = kRows == 1 ? 4 : kRows == 2 ? 2 : 1;
  std::int64_t d = 0;
  for (; d + kVecs * kLanes <= size; d += kVecs * kLanes) {
    add_values_block<kRows, kVecs>(weights, weights_stride, values, begin, end, d, output,
                                   output_stride);
  }
  for (; d < size; d += kLanes) {
    add_values_block<kRows, 1>(weights, weights_stride, values, begin, end, d, output,
                               output_stride);
  }
}

// Calls f<kRows>(first row) over [0, num_rows) in groups of four and one group of what is left.
template <class F>
void for_row_groups(std::int64_t num_rows, F&& f) {
  std::int64_t row = 0;
  for (; row + 4 <= num_rows; row += 4) f.template operator()<4>(row);
  switch (num_rows - row) {
    case 3:
      return f.template operator()<3>(row);
    case 2:
      return f.template operator()<2>(row);
    case 1:
      return f.template operator()<1>(row);
    default:
      return;
  }
}

}  // namespace paged_kv::cpu
