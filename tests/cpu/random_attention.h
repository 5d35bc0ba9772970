// SPDX-License-Identifier: Apache-2.0
//
// Attention problems of random shapes, layouts, types and features, with their definition in
// double. All memory is exactly as large as it must be and what may not be read is NaN.
#pragma once

#include "ops/cpu/attention_batch.h"
#include "ops/cpu/paged_attention.h"
#include "random_cache.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

namespace paged_kv::cpu::testing {

// A random problem, with the result of its definition.
class RandomAttention {
 public:
  // kDecode: one query a sequence and no more features than paged_attention_v1 and _v2 have.
  enum class Kind { kAny, kDecode };

  RandomAttention(std::uint32_t seed, const AttentionKernels& kernels, Kind kind = Kind::kAny)
      : random_(seed), kind_(kind) {
    choose_batch();
    choose_shapes();
    choose_features();
    params_.kernels = &kernels;
    params_.min_products_per_thread = 1;
  }

  PagedAttentionParams& params() { return params_; }

  void run(const ThreadRunner& runner) {
    std::ranges::fill(lse_, NAN);
    std::ranges::fill(out_, std::byte{0x7f});
    check_batch(params_.batch, params_.mask);
    paged_attention(params_, runner);
  }

  // The same through partitions; LSE is left out. For Kind::kDecode.
  void run_partitioned(const ThreadRunner& runner) {
    params_.lse = nullptr;
    std::ranges::fill(out_, std::byte{0x7f});
    check_batch(params_.batch, params_.mask);
    if (query_type_ == ElementType::kFloat) run_partitioned_as<float>(runner);
    if (query_type_ == ElementType::kHalf) run_partitioned_as<Half>(runner);
    if (query_type_ == ElementType::kBFloat16) run_partitioned_as<BFloat16>(runner);
  }

  [[nodiscard]] const std::vector<std::byte>& out() const { return out_; }
  // What the last run_partitioned() left in its buffers.
  [[nodiscard]] const std::vector<std::byte>& partitions() const { return partitions_; }
  [[nodiscard]] std::vector<std::uint32_t> lse_bits() const {
    std::vector<std::uint32_t> bits;
    for (const float x : lse_) bits.push_back(std::bit_cast<std::uint32_t>(x));
    return bits;
  }

  // Some rows of each sequence; the definition is slow.
  void expect_definition() {
    for (std::int64_t seq = 0; seq < std::ssize(lens_); ++seq) {
      const std::int64_t num_queries = params_.batch.query_len(seq);
      if (num_queries == 0) continue;
      for (int i = 0; i < 4; ++i) {
        expect_row(seq, random_.between(0, num_queries - 1),
                   random_.between(0, params_.num_heads - 1));
      }
    }
  }

 private:
  void choose_batch() {
    const std::int64_t num_seqs = random_.between(0, 4);
    const bool is_decode = kind_ == Kind::kDecode || random_.one_in(2);
    starts_ = {0};
    for (std::int64_t seq = 0; seq < num_seqs; ++seq) {
      const bool is_long = random_.one_in(kind_ == Kind::kDecode ? 2 : 6);
      const std::int64_t len = is_long ? random_.between(0, 1400) : random_.between(0, 80);
      const std::int64_t queries = is_decode ? 1 : random_.between(0, 24);
      lens_.push_back(static_cast<std::int32_t>(len));
      starts_.push_back(starts_.back() + static_cast<std::int32_t>(queries));
    }
    has_starts_ = !(is_decode && random_.one_in(2));
  }

  void choose_shapes() {
    constexpr std::array<std::int64_t, 10> kHeadSizes = {1, 3, 8, 20, 32, 40, 64, 72, 128, 256};
    constexpr std::array<std::int64_t, 6> kBlockSizes = {1, 4, 8, 16, 24, 32};
    sizes_.block_size = random_.one_of(kBlockSizes);
    sizes_.head_size = random_.one_of(kHeadSizes);
    sizes_.num_kv_heads = random_.between(1, 3);
    const std::int64_t group = random_.one_in(8) ? random_.between(9, 70) : random_.between(1, 8);
    const auto types = kElementTypes;
    cache_type_ = *(types.begin() + random_.between(0, kNumElementTypes - 1));
    query_type_ = *(types.begin() + random_.between(0, kNumFloatTypes - 1));
    Layout layout = static_cast<Layout>(random_.between(0, kNumLayouts - 1));
    const std::int64_t x = 16 / element_size(cache_type_);
    if (layout == Layout::kPacked && sizes_.head_size % x != 0) layout = Layout::kNhd;
    if (layout == Layout::kPanels) {
      sizes_.head_size = round_up<std::int64_t>(sizes_.head_size, 16);
      sizes_.block_size = round_up<std::int64_t>(sizes_.block_size, 16);
    }

    std::int64_t max_blocks = 0, used_blocks = 0;
    for (const std::int32_t len : lens_) {
      const std::int64_t blocks = (len + sizes_.block_size - 1) / sizes_.block_size;
      max_blocks = std::max(max_blocks, blocks);
      used_blocks += blocks;
    }
    sizes_.num_blocks = used_blocks + 1;
    std::vector<std::int32_t> ids(index(sizes_.num_blocks));
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i);
    for (std::size_t i = ids.size(); i > 1; --i) {
      std::swap(ids[i - 1], ids[index(random_.between(0, static_cast<std::int64_t>(i) - 1))]);
    }
    max_blocks += random_.between(0, 2);
    tables_.assign(lens_.size() * index(max_blocks), std::numeric_limits<std::int32_t>::max());

    key_ = make_side(layout, true, cache_type_, sizes_);
    value_ = make_side(layout, false, cache_type_, sizes_);
    if (cache_type_ >= ElementType::kFloat8E4M3) {
      for (std::int64_t h = 0; h < sizes_.num_kv_heads; ++h) {
        scales_.push_back(cache_type_ == ElementType::kInt8 ? 0.01f
                                                            : 0.5f + 0.3f * random_.normal());
      }
      key_.view.scale = value_.view.scale = {scales_.data(), random_.one_in(2) ? 1 : 0};
    }
    std::size_t next = 0;
    for (std::size_t seq = 0; seq < lens_.size(); ++seq) {
      for (std::int64_t pos = 0; pos < lens_[seq]; ++pos) {
        std::int32_t& id = tables_[seq * index(max_blocks) + index(pos / sizes_.block_size)];
        if (pos % sizes_.block_size == 0) id = ids[next++];
        write_token(id, pos % sizes_.block_size);
      }
    }

    const std::int64_t num_tokens = starts_.back();
    params_.batch = {
        .query_start_loc = {has_starts_ ? starts_.data() : nullptr, std::ssize(starts_), 1},
        .seq_lens = {lens_.data(), std::ssize(lens_), 1},
        .block_tables = {tables_.data(), std::ssize(lens_), max_blocks, max_blocks, 1},
        .num_tokens = num_tokens,
        .num_blocks = sizes_.num_blocks,
        .block_size = sizes_.block_size,
        .max_query_len = -1,
        .max_seq_len = -1,
    };
    params_.cache_type = cache_type_;
    params_.key = key_.view;
    params_.value = value_.view;
    params_.num_kv_heads = sizes_.num_kv_heads;
    params_.num_heads = sizes_.num_kv_heads * group;
    params_.head_size = sizes_.head_size;
    params_.scale = 1.0f / std::sqrt(static_cast<float>(sizes_.head_size));

    const std::int64_t elements = num_tokens * params_.num_heads * params_.head_size;
    const std::int64_t e = element_size(query_type_);
    query_.resize(index(elements * e));
    for (std::int64_t i = 0; i < elements; ++i) {
      const std::uint32_t bits = random_bits(query_type_, random_);
      std::memcpy(query_.data() + i * e, &bits, index(e));
    }
    out_.resize(query_.size());
    lse_.resize(index(num_tokens * params_.num_heads));
    params_.query_type = query_type_;
    params_.query = query_.data();
    params_.out = out_.data();
    params_.query_head_stride = params_.out_head_stride = params_.head_size;
    params_.query_token_stride = params_.out_token_stride = params_.num_heads * params_.head_size;
    params_.lse = lse_.data();
    params_.lse_head_stride = num_tokens;
    params_.lse_token_stride = 1;
  }

  void write_token(std::int64_t block, std::int64_t offset) {
    for (Side* side : {&key_, &value_}) {
      for (std::int64_t head = 0; head < sizes_.num_kv_heads; ++head) {
        for (std::int64_t d = 0; d < sizes_.head_size; ++d) {
          const std::uint32_t bits = random_bits(cache_type_, random_);
          std::memcpy(side->element(block, offset, head, d), &bits,
                      index(element_size(cache_type_)));
        }
      }
    }
  }

  void choose_features() {
    params_.mask = {.causal = true, .sliding_window = 0};
    if (kind_ == Kind::kAny) choose_features_of_varlen();
    for (std::int64_t head = 0; head < params_.num_heads; ++head) {
      slopes_.push_back(0.02f * random_.normal());
    }
    if (random_.one_in(4)) {
      params_.alibi_slopes = slopes_.data();
      params_.alibi_stride = 1;
    }
    if (random_.one_in(6)) {
      params_.sparsity = {.local_blocks = random_.between(0, 3),
                          .vert_stride = random_.between(2, 5),
                          .block_size = sizes_.block_size * random_.between(1, 3),
                          .head_sliding_step = random_.between(-2, 2),
                          .tp_rank = 0};
    }
  }

  void choose_features_of_varlen() {
    params_.mask = {.causal = !random_.one_in(4),
                    .sliding_window = random_.one_in(3) ? random_.between(1, 100) : 0};
    params_.softcap = random_.one_in(4) ? 5.0f : 0.0f;
    for (std::int64_t head = 0; head < params_.num_heads; ++head) {
      sinks_.push_back(random_.one_in(9) ? -INFINITY : random_.normal());
    }
    if (random_.one_in(4)) {
      params_.sinks = sinks_.data();
      params_.sinks_stride = 1;
    }
  }

  // Buffers with a partition more than is needed, everything poisoned.
  template <class T>
  void run_partitioned_as(const ThreadRunner& runner) {
    std::int64_t longest = 0;
    for (const std::int32_t len : lens_) longest = std::max(longest, std::int64_t{len});
    const std::int64_t max_partitions = num_partitions(longest) + 1;
    const std::int64_t num_rows = params_.batch.num_seqs() * params_.num_heads * max_partitions;
    std::vector<float> exp_sums(index(num_rows), NAN), max_logits(index(num_rows), NAN);
    std::vector<T> tmp_out(index(num_rows * params_.head_size), to<T>(NAN));
    const std::int64_t seq_stride = params_.num_heads * max_partitions;
    paged_attention_partitioned(
        params_,
        PartitionBuffers<T>{.exp_sums = exp_sums.data(),
                            .max_logits = max_logits.data(),
                            .tmp_out = tmp_out.data(),
                            .exp_sums_seq_stride = seq_stride,
                            .exp_sums_head_stride = max_partitions,
                            .exp_sums_partition_stride = 1,
                            .max_logits_seq_stride = seq_stride,
                            .max_logits_head_stride = max_partitions,
                            .max_logits_partition_stride = 1,
                            .tmp_out_seq_stride = seq_stride * params_.head_size,
                            .tmp_out_head_stride = max_partitions * params_.head_size,
                            .tmp_out_partition_stride = params_.head_size},
        runner);
    expect_filled(exp_sums, max_partitions);
    expect_filled(max_logits, max_partitions);
    partitions_.clear();
    append_bytes(exp_sums);
    append_bytes(max_logits);
    append_bytes(tmp_out);
  }

  // The partitions that a sequence has are written, those past its end are left alone.
  void expect_filled(const std::vector<float>& buffer, std::int64_t max_partitions) const {
    for (std::int64_t i = 0; i < std::ssize(buffer); ++i) {
      const std::int64_t seq = i / (params_.num_heads * max_partitions);
      const bool is_used = i % max_partitions * kPartitionSize < lens_[index(seq)];
      ASSERT_EQ(std::isnan(buffer[index(i)]), !is_used) << "seq " << seq << " index " << i;
    }
  }

  template <class T>
  void append_bytes(const std::vector<T>& data) {
    const auto* bytes = reinterpret_cast<const std::byte*>(data.data());
    partitions_.insert(partitions_.end(), bytes, bytes + data.size() * sizeof(T));
  }

  double query_value(std::int64_t token, std::int64_t head, std::int64_t d) const {
    const std::int64_t e = element_size(query_type_);
    std::uint32_t bits = 0;
    const std::int64_t i = (token * params_.num_heads + head) * params_.head_size + d;
    std::memcpy(&bits, query_.data() + i * e, index(e));
    return double{element_value(query_type_, bits)};
  }

  void expect_row(std::int64_t seq, std::int64_t q, std::int64_t head) {
    const auto& p = params_;
    const std::int64_t kv_head = head / p.group_size();
    const std::int64_t token = p.batch.query_begin(seq) + q;
    const std::int64_t query_pos = p.batch.first_query_pos(seq) + q;
    const KeyRange visible = p.mask.visible(query_pos, lens_[index(seq)]);
    const std::int64_t sparse_offset =
        p.sparsity.enabled() ? p.sparsity.offset(head, p.num_heads, kv_head, p.num_kv_heads) : 0;
    std::vector<double> logits;
    std::vector<std::int64_t> positions;
    for (std::int64_t pos = visible.begin; pos < visible.end; ++pos) {
      if (p.sparsity.enabled() && !p.sparsity.visible(pos, query_pos, sparse_offset)) continue;
      const std::int64_t block = p.batch.block_tables(seq, pos / sizes_.block_size);
      double logit = 0;
      for (std::int64_t d = 0; d < p.head_size; ++d) {
        logit +=
            query_value(token, head, d) * key_.value(block, pos % sizes_.block_size, kv_head, d);
      }
      logit *= double{p.scale};
      if (p.softcap > 0) logit = std::tanh(logit / double{p.softcap}) * double{p.softcap};
      if (p.alibi_slopes != nullptr) {
        logit += double{slopes_[index(head)]} * static_cast<double>(pos - query_pos);
      }
      logits.push_back(logit);
      positions.push_back(pos);
    }
    std::vector<double> expected(index(p.head_size), 0.0);
    double lse = -INFINITY;
    if (!logits.empty()) {
      double max = *std::ranges::max_element(logits);
      if (p.sinks != nullptr) max = std::max(max, double{sinks_[index(head)]});
      double sum = p.sinks != nullptr ? std::exp(double{sinks_[index(head)]} - max) : 0.0;
      for (std::size_t i = 0; i < logits.size(); ++i) {
        const double weight = std::exp(logits[i] - max);
        sum += weight;
        const std::int64_t block = p.batch.block_tables(seq, positions[i] / sizes_.block_size);
        for (std::int64_t d = 0; d < p.head_size; ++d) {
          expected[index(d)] +=
              weight * value_.value(block, positions[i] % sizes_.block_size, kv_head, d);
        }
      }
      for (double& x : expected) x /= sum;
      lse = max + std::log(sum);
    }
    const double relative = query_type_ == ElementType::kFloat  ? 2e-5
                            : query_type_ == ElementType::kHalf ? 1e-3
                                                                : 8e-3;
    const std::int64_t e = element_size(query_type_);
    for (std::int64_t d = 0; d < p.head_size; ++d) {
      std::uint32_t bits = 0;
      const std::int64_t i = (token * p.num_heads + head) * p.head_size + d;
      std::memcpy(&bits, out_.data() + i * e, index(e));
      const double actual = double{element_value(query_type_, bits)};
      ASSERT_NEAR(actual, expected[index(d)], relative * (1.0 + std::abs(expected[index(d)])))
          << "seq " << seq << " query " << q << " head " << head << " d " << d;
    }
    if (p.lse == nullptr) return;
    const float actual_lse = lse_[index(head * p.lse_head_stride + token)];
    if (std::isinf(lse)) {
      ASSERT_EQ(actual_lse, -INFINITY);
    } else {
      ASSERT_NEAR(actual_lse, lse, 1e-4 * (1.0 + std::abs(lse)));
    }
  }

  Random random_;
  Kind kind_;
  Sizes sizes_{};
  ElementType cache_type_{}, query_type_{};
  bool has_starts_ = true;
  std::vector<std::int32_t> starts_, lens_, tables_;
  std::vector<float> scales_, slopes_, sinks_, lse_;
  std::vector<std::byte> query_, out_, partitions_;
  Side key_, value_;
  PagedAttentionParams params_{};
};

}  // namespace paged_kv::cpu::testing
