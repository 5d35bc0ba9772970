// SPDX-License-Identifier: Apache-2.0
//
// paged_attention_v1 and _v2 on the device: attention of one query a sequence, its last token, to
// keys and values in an x-packed cache.
//
//   logit = scale * q.k + slope * (key_pos - query_pos), of visible keys;
//   out = softmax(logits) . values; a query without visible keys gets zeros, one of NaN gets NaN.
//
// All arithmetic is float32. The sums of one (sequence, head) run in one order that depends on its
// own length alone: the same bits for any batch around it and any placement of the blocks.
//
// The host cannot read values without waiting for the device, so they are not checked. A sequence
// is cut at what its row of block_tables, max_seq_len and (v2) the partitions hold, a negative
// length counts as 0, and the tokens of a block whose id is out of range are not visible. What is
// not visible is not read.
//
// Source: vLLM 0.6 csrc/attention (the algorithm's outline); docs/kernels.md says what differs.
#pragma once

#include "ops/params/block_sparsity.h"
#include "ops/params/float_dtype.h"
#include "ops/params/kv_cache_dtype.h"
#include "ops/params/partitions.h"
#include "paged_kv/strided_view.h"

#include <cstdint>

#include <cuda_runtime.h>

namespace paged_kv::cuda {

// Strides in elements. head_size: one of kHeadSizes. Caches: base pointers, and strides but the
// last, are multiples of 16 bytes; those of values of kVectorTokens elements, if that is less.
struct PagedAttentionParams {
  FloatDtype dtype;  // of queries and outputs
  KvCacheDtype kv_cache_dtype;
  void* out;  // [num_seqs, num_heads, head_size], last dimension dense
  std::int64_t out_seq_stride, out_head_stride;
  const void* query;  // likewise
  std::int64_t query_seq_stride, query_head_stride;
  const void* key_cache;  // [num_blocks, num_kv_heads, head_size/x, block_size, x], last dense
  std::int64_t key_block_stride, key_head_stride, key_chunk_stride, key_token_stride;
  const void* value_cache;  // [num_blocks, num_kv_heads, head_size, block_size], last dense
  std::int64_t value_block_stride, value_head_stride, value_dim_stride;
  KvScale k_scale, v_scale;                     // used if the cache is quantised
  VectorView<const std::int32_t> seq_lens;      // [num_seqs] keys, the query's own included
  MatrixView<const std::int32_t> block_tables;  // [num_seqs, max_blocks]
  VectorView<const float> alibi_slopes;         // [num_heads], or without data
  BlockSparsity sparsity;
  std::int64_t num_blocks;
  std::int32_t block_size;  // is_supported_block_size()
  std::int32_t num_heads, num_kv_heads, head_size;
  std::int64_t max_seq_len;  // upper bound of seq_lens
  float scale;
};

// One block of threads a (head, sequence), with a float32 of shared memory for each token of
// max_seq_len.
// Raises std::invalid_argument: max_seq_len is beyond max_v1_seq_len() of the current device.
void paged_attention_v1(const PagedAttentionParams& params, cudaStream_t stream);

// One block of threads a (head, sequence, partition), then one a (head, sequence) that joins the
// partitions. Those past a sequence's end are left alone.
void paged_attention_v2(const PagedAttentionParams& params, const PartitionBuffers<void>& buffers,
                        std::int64_t max_partitions, cudaStream_t stream);

}  // namespace paged_kv::cuda
