// SPDX-License-Identifier: Apache-2.0
//
// paged_attention_v1 and _v2: their argument lists, and the checks that do not depend on where they
// run.
#pragma once

#include "ops/attention_checks.h"
#include "ops/params/block_sparsity.h"
#include "ops/params/partitions.h"
#include "ops/tensor_checks.h"
#include "ops/tensor_views.h"

#include <cstdint>
#include <optional>
#include <string>

namespace paged_kv {

// The arguments that v1 and v2 share, in their order.
struct DecodeArguments {
  const Tensor& out;
  const Tensor& query;
  const Tensor& key_cache;
  const Tensor& value_cache;
  std::int64_t num_kv_heads;
  double scale;
  const Tensor& block_tables;
  const Tensor& seq_lens;
  std::int64_t block_size;
  std::int64_t max_seq_len;
  const std::optional<Tensor>& alibi_slopes;
  const std::string& kv_cache_dtype;
  const Tensor& k_scale;
  const Tensor& v_scale;
  BlockSparsity sparsity;
};

// Those that v2 has besides.
struct PartitionTensors {
  const Tensor& exp_sums;
  const Tensor& max_logits;
  const Tensor& tmp_out;
};

// The ops as they are registered: kRun with the arguments in a struct.
template <void (*kRun)(const DecodeArguments&)>
void paged_attention_v1_op(const Tensor& out, const Tensor& query, const Tensor& key_cache,
                           const Tensor& value_cache, std::int64_t num_kv_heads, double scale,
                           const Tensor& block_tables, const Tensor& seq_lens,
                           std::int64_t block_size, std::int64_t max_seq_len,
                           const std::optional<Tensor>& alibi_slopes,
                           const std::string& kv_cache_dtype, const Tensor& k_scale,
                           const Tensor& v_scale, std::int64_t tp_rank, std::int64_t local_blocks,
                           std::int64_t vert_stride, std::int64_t sparse_block_size,
                           std::int64_t head_sliding_step) {
  kRun({out,
        query,
        key_cache,
        value_cache,
        num_kv_heads,
        scale,
        block_tables,
        seq_lens,
        block_size,
        max_seq_len,
        alibi_slopes,
        kv_cache_dtype,
        k_scale,
        v_scale,
        {local_blocks, vert_stride, sparse_block_size, head_sliding_step, tp_rank}});
}

template <void (*kRun)(const DecodeArguments&, const PartitionTensors&)>
void paged_attention_v2_op(const Tensor& out, const Tensor& exp_sums, const Tensor& max_logits,
                           const Tensor& tmp_out, const Tensor& query, const Tensor& key_cache,
                           const Tensor& value_cache, std::int64_t num_kv_heads, double scale,
                           const Tensor& block_tables, const Tensor& seq_lens,
                           std::int64_t block_size, std::int64_t max_seq_len,
                           const std::optional<Tensor>& alibi_slopes,
                           const std::string& kv_cache_dtype, const Tensor& k_scale,
                           const Tensor& v_scale, std::int64_t tp_rank, std::int64_t local_blocks,
                           std::int64_t vert_stride, std::int64_t sparse_block_size,
                           std::int64_t head_sliding_step) {
  kRun({out,
        query,
        key_cache,
        value_cache,
        num_kv_heads,
        scale,
        block_tables,
        seq_lens,
        block_size,
        max_seq_len,
        alibi_slopes,
        kv_cache_dtype,
        k_scale,
        v_scale,
        {local_blocks, vert_stride, sparse_block_size, head_sliding_step, tp_rank}},
       {exp_sums, max_logits, tmp_out});
}

inline void check_sparsity(const BlockSparsity& sparsity, std::int64_t block_size) {
  constexpr std::int64_t kMaxRank = 1 << 16;
  constexpr std::int64_t kMaxSlidingStep = 1 << 20;
  if (!sparsity.enabled()) return;
  PAGED_KV_CHECK(sparsity.block_size > 0 && sparsity.block_size % block_size == 0,
                 "blocksparse_block_size: expected a multiple of block_size = ", block_size,
                 ", got ", sparsity.block_size);
  PAGED_KV_CHECK(sparsity.local_blocks >= 0, "blocksparse_local_blocks: expected >= 0, got ",
                 sparsity.local_blocks);
  // The bounds keep the pattern's offsets within 64 bits, and kernels' divisors within 32.
  constexpr std::int64_t kMaxVertStride = 0x7fffffff;
  PAGED_KV_CHECK(sparsity.vert_stride <= kMaxVertStride,
                 "blocksparse_vert_stride: expected <= ", kMaxVertStride, ", got ",
                 sparsity.vert_stride);
  PAGED_KV_CHECK(sparsity.tp_rank >= 0 && sparsity.tp_rank <= kMaxRank, "tp_rank: expected in [0, ",
                 kMaxRank, "], got ", sparsity.tp_rank);
  PAGED_KV_CHECK(sparsity.head_sliding_step >= -kMaxSlidingStep &&
                     sparsity.head_sliding_step <= kMaxSlidingStep,
                 "blocksparse_head_sliding_step: expected in [", -kMaxSlidingStep, ", ",
                 kMaxSlidingStep, "], got ", sparsity.head_sliding_step);
}

// The metadata, slopes and scales of one call.
struct DecodeInputs {
  cpu::AttentionBatch batch;
  PerHead slopes;
  KvScale k_scale, v_scale;
};

// All checks of shapes and dtypes. Binds num_tokens (also num_seqs), num_heads, head_size,
// num_blocks, block_size and num_kv_heads.
[[nodiscard]] inline DecodeInputs check_decode(const DecodeArguments& args,
                                               KvCacheDtype kv_cache_dtype, NamedSizes& sizes) {
  check_query(args.out, args.query, sizes);
  sizes.bind("num_kv_heads", args.num_kv_heads, "num_kv_heads");
  sizes.bind("block_size", args.block_size, "block_size");
  check_cache(args.key_cache, args.value_cache, kv_cache_dtype, args.query.scalar_type(), sizes);
  sizes.bind("num_seqs", sizes["num_tokens"], "query");
  const cpu::AttentionBatch batch =
      make_batch(nullptr, args.seq_lens, args.block_tables, -1, args.max_seq_len, sizes);
  const PerHead slopes = check_per_head(args.alibi_slopes, "alibi_slopes", sizes);
  const KvScale k_scale = check_scale(args.k_scale, "k_scale", sizes);
  const KvScale v_scale = check_scale(args.v_scale, "v_scale", sizes);
  check_attention_scale(args.scale);
  check_sparsity(args.sparsity, args.block_size);
  return {batch, slopes, k_scale, v_scale};
}

// After check_decode(). Binds max_partitions.
template <class T>
[[nodiscard]] PartitionBuffers<T> check_partition_buffers(const PartitionTensors& tensors,
                                                          ScalarType dtype, NamedSizes& sizes) {
  const auto& [exp_sums, max_logits, tmp_out] = tensors;
  check(exp_sums, "exp_sums", sizes)
      .shape({"num_tokens", "num_heads", "max_partitions"})
      .dtype(ScalarType::Float)
      .writable();
  check(max_logits, "max_logits", sizes)
      .shape({"num_tokens", "num_heads", "max_partitions"})
      .dtype(ScalarType::Float)
      .writable();
  check(tmp_out, "tmp_out", sizes)
      .shape({"num_tokens", "num_heads", "max_partitions", "head_size"})
      .dtype(dtype)
      .dense(-1)
      .writable();
  return {
      .exp_sums = data_of<float>(exp_sums),
      .max_logits = data_of<float>(max_logits),
      .tmp_out = data_of<T>(tmp_out),
      .exp_sums_seq_stride = exp_sums.stride(0),
      .exp_sums_head_stride = exp_sums.stride(1),
      .exp_sums_partition_stride = exp_sums.stride(2),
      .max_logits_seq_stride = max_logits.stride(0),
      .max_logits_head_stride = max_logits.stride(1),
      .max_logits_partition_stride = max_logits.stride(2),
      .tmp_out_seq_stride = tmp_out.stride(0),
      .tmp_out_head_stride = tmp_out.stride(1),
      .tmp_out_partition_stride = tmp_out.stride(2),
  };
}

}  // namespace paged_kv
