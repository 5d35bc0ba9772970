// SPDX-License-Identifier: Apache-2.0
//
// gather_cache: the cached tokens of each sequence, read through its block table into one
// contiguous row of tokens. The inverse of reshape_and_cache_flash.
//
// Source: vLLM csrc/cache_kernels.cu::cp_gather_cache (the contract). seq_starts counts tokens and
// need not be a multiple of the block size.
#pragma once

#include "ops/cpu/thread_runner.h"
#include "ops/cpu/token_copy.h"
#include "paged_kv/strided_view.h"

#include <cstdint>

namespace paged_kv::cpu {

struct GatherCacheParams {
  const void* cache;                            // [num_blocks, block_size, num_kv_heads, head_size]
  void* out;                                    // [num_out_tokens, num_kv_heads, head_size]
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
  std::int64_t element_size;  // bytes: 2 or 4
};

// out[cu_seq_lens[s] + i] = token seq_starts[s] + i of sequence s. Rows of `out` from
// cu_seq_lens[num_seqs] on are left alone. Lengths, starts and the block ids that are used are
// checked first: std::invalid_argument, nothing written. Cost: O(tokens * row), parallel over
// tokens.
void gather_cache(const GatherCacheParams& params, const ThreadRunner& runner);

}  // namespace paged_kv::cpu
