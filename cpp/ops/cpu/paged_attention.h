// SPDX-License-Identifier: Apache-2.0
//
// Attention of queries to keys and values in a paged cache, on the CPU.
//
//   logit = scale * q.k, then softcap, then ALiBi, then mask;
//   out = softmax(logits and, if given, the head's sink) . values; a query without keys gets zeros.
//
// All arithmetic is float32. The sums of one (query, head) run in one order that depends on its own
// positions alone: results are the same bits for any batch around it, any chunking of the prompt,
// any number of threads and any placement of the blocks, on one instruction set.
//
// What is not visible is not read: slots past seq_len, blocks before a sliding window, unused table
// entries. All offsets are 64-bit. Callers have run check_batch().
#pragma once

#include "ops/cpu/attention_batch.h"
#include "ops/cpu/isa/attention_kernels.h"
#include "ops/cpu/thread_runner.h"
#include "ops/params/block_sparsity.h"
#include "ops/params/kv_cache_dtype.h"
#include "ops/params/partitions.h"

#include <cstddef>
#include <cstdint>

namespace paged_kv::cpu {

// Largest head size of the attention kernels.
inline constexpr std::int64_t kMaxHeadSize = 256;

// The keys, or the values, of one layer, in any layout. Of groups in panels (layout `panels`,
// isa/token_panel_kernels.h), group i of a block begins at
//   block_id * block_stride + kv_head * head_stride + i * group_stride   bytes;
// of all else, dimension d of a token lies at
//   block_id * block_stride + offset_in_block * token_stride + kv_head * head_stride
//     + (d / chunk_size) * chunk_stride + (d % chunk_size) * dim_stride   bytes,
// where chunk_size is x for the keys of the x-packed layout and head_size for all else.
struct CacheSide {
  const std::byte* data;
  std::int64_t block_stride, token_stride, head_stride, dim_stride;  // bytes
  std::int64_t chunk_size, chunk_stride;                             // elements, bytes
  std::int64_t group_stride;                                         // bytes; 0: not in panels
  // An element's value is scale[kv_head] times what is stored; null: what is stored.
  KvScale scale;

  [[nodiscard]] bool in_panels() const noexcept { return group_stride != 0; }
  [[nodiscard]] float scale_of(std::int64_t kv_head) const noexcept {
    return scale.data != nullptr ? scale[kv_head] : 1.0f;
  }
};

struct PagedAttentionParams {
  const AttentionKernels* kernels;
  AttentionBatch batch;
  AttentionMask mask;

  ElementType cache_type;
  CacheSide key, value;

  ElementType query_type;  // of query and out
  const void* query;       // [num_tokens, num_heads, head_size], last dimension dense
  std::int64_t query_token_stride, query_head_stride;
  void* out;  // [num_tokens, num_heads, head_size], last dimension dense
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

  // A thread is used if the batch has so many products of query and key elements for it: waking it
  // takes some microseconds, in which one alone does a short decode step.
  std::int64_t min_products_per_thread = 1 << 18;

  [[nodiscard]] std::int64_t group_size() const noexcept { return num_heads / num_kv_heads; }
  // head_size in whole vectors of the instruction set.
  [[nodiscard]] std::int64_t padded_head_size() const noexcept {
    return round_up<std::int64_t>(head_size, kernels->lanes);
  }
};

// Writes out (and lse) for all queries of the batch; rows past the last query are left alone.
// Threads share (sequence, kv head, tile of queries, range of keys) items; a long sequence is cut
// into ranges if there is not enough else to do. Scratch: O(threads * tile + cut tiles *
// head_size), kept by the calling thread for its next call.
void paged_attention(const PagedAttentionParams& params, const ThreadRunner& runner);

// One query a sequence. Each partition of keys is attended to on its own, into `partitions` (those
// past a sequence's end are left alone); then the parts are joined into out. T is the type of the
// queries. Ignores lse and sinks.
template <class T>
void paged_attention_partitioned(const PagedAttentionParams& params,
                                 const PartitionBuffers<T>& partitions, const ThreadRunner& runner);

}  // namespace paged_kv::cpu
