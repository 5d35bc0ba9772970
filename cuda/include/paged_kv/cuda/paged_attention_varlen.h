// SPDX-License-Identifier: Apache-2.0
//
// paged_attention_varlen on the device: attention of ragged batches (prefill, chunks, decode) to
// keys and values in a cache whose heads lie in one piece (nhd, hnd).
//
//   logit = scale * q.k, then softcap, then ALiBi, then mask;
//   out = softmax(logits and, if given, the head's sink) . values; a query without keys gets zeros.
//
// This is the baseline: one kernel for every head size, block size and feature, and no tensor
// cores. All arithmetic is float32. The sums of one (query, head) run in one order that depends on
// its own position alone: the same bits for any batch around it, any chunks of the prompt and any
// placement of the blocks. The grid follows from shapes, nothing is allocated and nobody waits, so
// that a CUDA graph may hold the launch.
//
// The host cannot read values without waiting for the device, so they are not checked. A sequence
// is cut at what its row of block_tables and max_seq_len hold, a negative length counts as 0, and
// the tokens of a block whose id is out of range are not visible. A query that no sequence holds
// (padding) is left alone; so are queries of a query_start_loc that decreases, or they get the
// answer of another sequence. What is not visible is not read.
//
// Source: arXiv 2205.14135 (online softmax); the contract is cpp/ops/cpu/paged_attention.h.
#pragma once

#include "ops/params/float_dtype.h"
#include "ops/params/kv_cache_dtype.h"
#include "paged_kv/strided_view.h"

#include <cstdint>

#include <cuda_runtime.h>

namespace paged_kv::cuda {

// A lane reads this many elements of a key at once, so head sizes are multiples of it.
inline constexpr int kVarlenChunk = 8;
inline constexpr int kMaxVarlenHeadSize = 32 * kVarlenChunk;

// What a vector of kVarlenChunk elements of a cache must be aligned to.
[[nodiscard]] constexpr std::int64_t varlen_alignment(std::int64_t cache_element_bytes) noexcept {
  return cache_element_bytes == 1 ? 8 : 16;
}

// One side of a cache, [num_blocks, block_size, num_kv_heads, head_size]: strides in elements; the
// last is 1, the others and the address are multiples of varlen_alignment().
struct VarlenCacheSide {
  const void* data;
  std::int64_t block_stride, token_stride, head_stride;
  KvScale scale;  // of a quantised cache; null: 1
};

struct PagedAttentionVarlenParams {
  FloatDtype dtype;  // of query and out
  KvCacheDtype kv_cache_dtype;
  void* out;          // [num_tokens, num_heads, head_size], last dimension dense
  const void* query;  // likewise
  std::int64_t out_token_stride, out_head_stride;
  std::int64_t query_token_stride, query_head_stride;
  MatrixView<float> lse;  // [num_heads, num_tokens], or without data; natural log
  VarlenCacheSide key, value;
  VectorView<const std::int32_t> query_start_loc;  // [num_seqs + 1]
  VectorView<const std::int32_t> seq_lens;         // [num_seqs] keys, this step's tokens included
  MatrixView<const std::int32_t> block_tables;     // [num_seqs, max_blocks]
  VectorView<const float> alibi_slopes;            // [num_heads], or without data
  VectorView<const float> sinks;                   // [num_heads], or without data
  std::int64_t num_tokens;
  std::int64_t num_blocks;
  std::int32_t block_size;  // >= 1
  std::int32_t num_heads, num_kv_heads;
  std::int32_t head_size;       // a multiple of kVarlenChunk, at most kMaxVarlenHeadSize
  std::int64_t max_seq_len;     // upper bound of seq_lens; -1: none
  std::int64_t sliding_window;  // keys seen, the query's own included; 0: all
  bool causal;
  float scale;
  float softcap;  // 0: none
};

// One block of 4 warps a (query, head). Cost: reads head_size elements of each visible key and of
// its value, and computes 4 * head_size operations with them, once a query head; heads that share a
// KV head are neighbours in the grid, so that the L2 cache serves all but the first. A prompt's
// queries share nothing but that cache either: long prompts are what this kernel is slowest at.
void paged_attention_varlen(const PagedAttentionVarlenParams& params, cudaStream_t stream);

}  // namespace paged_kv::cuda
