// SPDX-License-Identifier: Apache-2.0
//
// Attention of queries to keys and values in a paged cache, on the CPU.
//
//   logit = scale * q.k, then softcap, then ALiBi, then mask;
//   out = softmax(logits and, if given, the head's sink) . values; a query without keys gets zeros.
//
// All arithmetic is float32. The sums of one (query, head) run in one order that depends on its own
// positions alone: results are the same bits for any batch around it, any chunking of the prompt,
// any number of threads and any placement of the blocks.
//
// What is not visible is not read: slots past seq_len, blocks before a sliding window, unused table
// entries. All offsets are 64-bit. Callers have run check_batch().
#pragma once

#include "ops/cpu/attention_batch.h"
#include "ops/cpu/thread_runner.h"
#include "ops/params/block_sparsity.h"
#include "ops/params/partitions.h"

#include <cstdint>

namespace paged_kv::cpu {

// Largest head size of the attention kernels.
inline constexpr std::int64_t kMaxHeadSize = 256;

// The cache of one layer, in any layout. Strides in elements. The key of dimension d lies at
//   block_id * block_stride + offset_in_block * token_stride + kv_head * head_stride
//     + (d / chunk_size) * chunk_stride + (d % chunk_size) * dim_stride,
// with chunk_size = x for the x-packed layout and head_size for all others; a value likewise, but
// without chunks.
template <class T>
struct PagedKvCache {
  const T* key;
  std::int64_t key_block_stride, key_token_stride, key_head_stride, key_dim_stride;
  std::int64_t key_chunk_size, key_chunk_stride;
  const T* value;
  std::int64_t value_block_stride, value_token_stride, value_head_stride, value_dim_stride;
};

template <class T>
struct PagedAttentionParams {
  AttentionBatch batch;
  AttentionMask mask;
  PagedKvCache<T> cache;

  const T* query;  // [num_tokens, num_heads, head_size], last dimension dense
  std::int64_t query_token_stride, query_head_stride;
  T* out;  // [num_tokens, num_heads, head_size], last dimension dense
  std::int64_t out_token_stride, out_head_stride;
  float* lse;  // [num_heads, num_tokens] or null; natural log, -inf for a query without keys
  std::int64_t lse_head_stride, lse_token_stride;

  std::int64_t num_heads, num_kv_heads, head_size;
  float scale;
  float softcap;              // 0 = none
  const float* alibi_slopes;  // [num_heads] or null
  std::int64_t alibi_stride;
  const float* sinks;  // [num_heads] or null
  std::int64_t sinks_stride;
  BlockSparsity sparsity;

  [[nodiscard]] std::int64_t group_size() const noexcept { return num_heads / num_kv_heads; }
};

// Writes out (and lse) for all queries of the batch; rows past the last query are left alone.
// Threads share (sequence, kv head, tile of queries) items. Scratch: O(threads * tile).
template <class T>
void paged_attention(const PagedAttentionParams<T>& params, const ThreadRunner& runner);

// One query a sequence. Each partition of keys is attended to on its own, into `partitions` (those
// past a sequence's end are left alone); then the parts are joined into out. Ignores lse and sinks.
template <class T>
void paged_attention_partitioned(const PagedAttentionParams<T>& params,
                                 const PartitionBuffers<T>& partitions, const ThreadRunner& runner);

}  // namespace paged_kv::cpu
