// SPDX-License-Identifier: Apache-2.0
//
// gather_cache: the cached tokens of each sequence, read through its block table into one
// contiguous row of tokens. The inverse of reshape_and_cache_flash.
//
//   out[cu_seq_lens[s] + i] = token seq_starts[s] + i of sequence s
//
// Rows of `out` from cu_seq_lens[num_seqs] on are left alone. seq_starts counts tokens and need not
// be a multiple of the block size.
//
// Source: vLLM csrc/cache_kernels.cu::cp_gather_cache (the contract).
#pragma once

#include "ops/params/cache_panels.h"
#include "ops/params/float_dtype.h"
#include "ops/params/kv_cache_dtype.h"
#include "ops/params/token_strides.h"
#include "paged_kv/strided_view.h"

#include <cstdint>

namespace paged_kv {

struct GatherCacheParams {
  const void* cache;  // [num_blocks, block_size, num_kv_heads, head_size], or panels
  void* out;          // [num_out_tokens, num_kv_heads, head_size]
  MatrixView<const std::int32_t> block_tables;  // [num_seqs, max_blocks]
  VectorView<const std::int32_t> cu_seq_lens;   // [num_seqs + 1], cu_seq_lens[0] == 0
  VectorView<const std::int32_t> seq_starts;    // [num_seqs]; data == nullptr: all 0
  std::int64_t num_blocks;
  std::int64_t block_size;
  std::int64_t num_kv_heads;
  std::int64_t head_size;
  std::int64_t block_stride;
  std::int64_t offset_stride;
  TokenStrides cache_strides;
  std::int64_t num_out_tokens;
  std::int64_t out_token_stride;
  TokenStrides out_strides;
  std::int64_t element_size;  // bytes of an element of out: 2 or 4
  // What quantised caches need besides.
  FloatDtype dtype = FloatDtype::kFloat;  // of out
  KvCacheDtype kv_cache_dtype = KvCacheDtype::kAuto;
  KvScale scale = {nullptr, 0};
  // CPU only. Panels have no use for offset_stride and cache_strides.dim.
  CachePanels panels = CachePanels::kNone;
};

}  // namespace paged_kv
