// SPDX-License-Identifier: Apache-2.0
//
// A small problem of paged_attention_v1/v2 on raw memory, and its answer in float64.
#pragma once

#include "paged_kv/cuda/dtype.cuh"
#include "paged_kv/cuda/paged_attention.h"
#include "paged_kv/cuda/paged_attention_config.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>

namespace paged_kv::cuda::testing {

// The elements of queries and caches that the attention kernels are made for.
template <class QueryT, class Cache>
struct Elements {
  using T = QueryT;
  using CacheT = Cache;
};

using AllElements =
    ::testing::Types<Elements<float, float>, Elements<float, Float8E4M3>,
                     Elements<float, Float8E5M2>, Elements<Half, Half>, Elements<Half, Float8E4M3>,
                     Elements<Half, Float8E5M2>, Elements<BFloat16, BFloat16>,
                     Elements<BFloat16, Float8E4M3>, Elements<BFloat16, Float8E5M2>>;

template <class T>
constexpr FloatDtype kDtype = std::is_same_v<T, float>  ? FloatDtype::kFloat
                              : std::is_same_v<T, Half> ? FloatDtype::kHalf
                                                        : FloatDtype::kBFloat16;
template <class CacheT>
constexpr KvCacheDtype kCacheDtype =
    std::is_same_v<CacheT, Float8E4M3>   ? KvCacheDtype::kFloat8E4M3
    : std::is_same_v<CacheT, Float8E5M2> ? KvCacheDtype::kFloat8E5M2
                                         : KvCacheDtype::kAuto;

struct ProblemSizes {
  std::vector<std::int32_t> seq_lens;
  int num_heads = 2;
  int num_kv_heads = 1;
  int head_size = 32;
  int block_size = 8;
};

// Every tensor is exactly as large as it must be, so that ASan sees any access past it. Slots that
// no sequence holds are NaN, table entries that none uses are absurd.
template <class T, class CacheT>
class AttentionProblem {
 public:
  explicit AttentionProblem(ProblemSizes sizes) : sizes_(std::move(sizes)) {
    for (const int seq_len : sizes_.seq_lens) {
      max_blocks_ = std::max(max_blocks_, ceil_div(seq_len, sizes_.block_size));
      num_blocks_ += ceil_div(seq_len, sizes_.block_size);
    }
    const CacheT nan = from_float<CacheT>(std::numeric_limits<float>::quiet_NaN());
    const int cache_size = num_blocks_ * sizes_.num_kv_heads * sizes_.head_size * sizes_.block_size;
    keys_.assign(static_cast<std::size_t>(cache_size), nan);
    values_.assign(static_cast<std::size_t>(cache_size), nan);
    tables_.assign(static_cast<std::size_t>(num_seqs() * max_blocks_), 2'147'480'000);
    fill(query_, num_seqs() * sizes_.num_heads * sizes_.head_size);
    out_.resize(query_.size());
    slopes_ = {0.25f, -0.125f, 0.0f, 0.5f};
    slopes_.resize(static_cast<std::size_t>(sizes_.num_heads));

    int next_block = num_blocks_;  // from the last one down
    for (int seq = 0; seq < num_seqs(); ++seq) {
      for (int pos = 0; pos < seq_len(seq); ++pos) {
        if (pos % sizes_.block_size == 0) table(seq, pos / sizes_.block_size) = --next_block;
        for (int head = 0; head < sizes_.num_kv_heads; ++head) {
          for (int d = 0; d < sizes_.head_size; ++d) {
            keys_[key_index(seq, pos, head, d)] = from_float<CacheT>(normal_(random_));
            values_[value_index(seq, pos, head, d)] = from_float<CacheT>(normal_(random_));
          }
        }
      }
    }
  }

  [[nodiscard]] int num_seqs() const { return static_cast<int>(sizes_.seq_lens.size()); }
  [[nodiscard]] std::int32_t& seq_len(int seq) {
    return sizes_.seq_lens[static_cast<std::size_t>(seq)];
  }
  [[nodiscard]] std::int32_t& table(int seq, int i) {
    return tables_[static_cast<std::size_t>(seq * max_blocks_ + i)];
  }
  [[nodiscard]] int num_blocks() const { return num_blocks_; }

  [[nodiscard]] PagedAttentionParams params() {
    const int x = kChunkBytes / static_cast<int>(sizeof(CacheT));
    const int row = sizes_.head_size * sizes_.block_size;
    return {
        .dtype = kDtype<T>,
        .kv_cache_dtype = kCacheDtype<CacheT>,
        .out = out_.data(),
        .out_seq_stride = sizes_.num_heads * sizes_.head_size,
        .out_head_stride = sizes_.head_size,
        .query = query_.data(),
        .query_seq_stride = sizes_.num_heads * sizes_.head_size,
        .query_head_stride = sizes_.head_size,
        .key_cache = keys_.data(),
        .key_block_stride = sizes_.num_kv_heads * row,
        .key_head_stride = row,
        .key_chunk_stride = sizes_.block_size * x,
        .key_token_stride = x,
        .value_cache = values_.data(),
        .value_block_stride = sizes_.num_kv_heads * row,
        .value_head_stride = row,
        .value_dim_stride = sizes_.block_size,
        .k_scale = {&k_scale_, 0},
        .v_scale = {&v_scale_, 0},
        .seq_lens = {sizes_.seq_lens.data(), num_seqs(), 1},
        .block_tables = {tables_.data(), num_seqs(), max_blocks_, max_blocks_, 1},
        .alibi_slopes = {slopes_.data(), sizes_.num_heads, 1},
        .sparsity = {},
        .num_blocks = num_blocks_,
        .block_size = sizes_.block_size,
        .num_heads = sizes_.num_heads,
        .num_kv_heads = sizes_.num_kv_heads,
        .head_size = sizes_.head_size,
        .max_seq_len = std::int64_t{max_blocks_} * sizes_.block_size,
        .scale = 0.3f,
    };
  }

  [[nodiscard]] std::vector<T> run_v1() {
    paged_attention_v1(params(), nullptr);
    return out_;
  }

  [[nodiscard]] std::vector<T> run_v2() {
    const std::int64_t max_partitions = num_partitions(params().max_seq_len);
    const std::int64_t rows = std::int64_t{num_seqs()} * sizes_.num_heads;
    std::vector<float> exp_sums(static_cast<std::size_t>(rows * max_partitions));
    std::vector<float> max_logits(exp_sums.size());
    std::vector<T> tmp_out(exp_sums.size() * static_cast<std::size_t>(sizes_.head_size));
    const std::int64_t seq_stride = sizes_.num_heads * max_partitions;
    const PartitionBuffers<void> buffers{exp_sums.data(),
                                         max_logits.data(),
                                         tmp_out.data(),
                                         seq_stride,
                                         max_partitions,
                                         1,
                                         seq_stride,
                                         max_partitions,
                                         1,
                                         seq_stride * sizes_.head_size,
                                         max_partitions * sizes_.head_size,
                                         sizes_.head_size};
    paged_attention_v2(params(), buffers, max_partitions, nullptr);
    return out_;
  }

  // The largest error of `out` against float64, relative to the largest value.
  [[nodiscard]] double error_of(const std::vector<T>& out) {
    double error = 0;
    for (int seq = 0; seq < num_seqs(); ++seq) {
      for (int head = 0; head < sizes_.num_heads; ++head) {
        const std::vector<double> expected = answer(seq, head);
        for (int d = 0; d < sizes_.head_size; ++d) {
          const double actual = to_float(out[query_index(seq, head, d)]);
          const double difference = std::fabs(actual - expected[static_cast<std::size_t>(d)]);
          if (!(difference <= error)) error = difference;  // NaN is the largest
        }
      }
    }
    return error / 4;  // values are normal: the largest is about 4
  }

 private:
  void fill(std::vector<T>& elements, int count) {
    for (int i = 0; i < count; ++i) elements.push_back(from_float<T>(normal_(random_)));
  }

  [[nodiscard]] std::size_t query_index(int seq, int head, int d) const {
    return static_cast<std::size_t>((seq * sizes_.num_heads + head) * sizes_.head_size + d);
  }
  [[nodiscard]] std::size_t key_index(int seq, int pos, int head, int d) {
    const int x = kChunkBytes / static_cast<int>(sizeof(CacheT));
    const int block = table(seq, pos / sizes_.block_size) * sizes_.num_kv_heads + head;
    return static_cast<std::size_t>(
        ((block * sizes_.head_size / x + d / x) * sizes_.block_size + pos % sizes_.block_size) * x +
        d % x);
  }
  [[nodiscard]] std::size_t value_index(int seq, int pos, int head, int d) {
    const int block = table(seq, pos / sizes_.block_size) * sizes_.num_kv_heads + head;
    return static_cast<std::size_t>((block * sizes_.head_size + d) * sizes_.block_size +
                                    pos % sizes_.block_size);
  }

  [[nodiscard]] std::vector<double> answer(int seq, int head) {
    const bool is_quantised = kCacheDtype<CacheT> != KvCacheDtype::kAuto;
    const double k_scale = is_quantised ? k_scale_ : 1.0f;
    const double v_scale = is_quantised ? v_scale_ : 1.0f;
    const int kv_head = head / (sizes_.num_heads / sizes_.num_kv_heads);
    std::vector<double> result(static_cast<std::size_t>(sizes_.head_size), 0.0);
    std::vector<double> logits;
    for (int pos = 0; pos < seq_len(seq); ++pos) {
      double dot = 0;
      for (int d = 0; d < sizes_.head_size; ++d) {
        dot += double{to_float(query_[query_index(seq, head, d)])} *
               to_float(keys_[key_index(seq, pos, kv_head, d)]);
      }
      const int distance = pos - (seq_len(seq) - 1);
      logits.push_back(double{0.3f} * k_scale * dot +
                       double{slopes_[static_cast<std::size_t>(head)]} * distance);
    }
    if (logits.empty()) return result;
    const double max_logit = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (const double logit : logits) sum += std::exp(logit - max_logit);
    for (int pos = 0; pos < seq_len(seq); ++pos) {
      const double weight = std::exp(logits[static_cast<std::size_t>(pos)] - max_logit) / sum;
      for (int d = 0; d < sizes_.head_size; ++d) {
        result[static_cast<std::size_t>(d)] +=
            weight * v_scale * to_float(values_[value_index(seq, pos, kv_head, d)]);
      }
    }
    return result;
  }

  ProblemSizes sizes_;
  int max_blocks_ = 0;
  int num_blocks_ = 0;
  std::mt19937 random_{1};
  std::normal_distribution<float> normal_;
  std::vector<std::int32_t> tables_;
  std::vector<T> query_, out_;
  std::vector<CacheT> keys_, values_;
  std::vector<float> slopes_;
  float k_scale_ = 0.5f;
  float v_scale_ = 0.75f;
};

}  // namespace paged_kv::cuda::testing
