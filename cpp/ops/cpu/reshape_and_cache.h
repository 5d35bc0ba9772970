// SPDX-License-Identifier: Apache-2.0
//
// Cache writers: put the keys and values of new tokens into their slots.
//   reshape_and_cache        layout `vllm`: x-packed keys, transposed values
//   reshape_and_cache_flash  layouts `nhd` and `hnd`, told apart by their strides alone
//
// Common contract:
//   - The token count is slot_mapping.size; key and value may hold more tokens (padding).
//   - A negative slot is skipped: its key and value are not read.
//   - A slot >= num_blocks * block_size: std::invalid_argument, and nothing has been written.
//   - Two tokens with the same slot: either one wins. Key and value must not overlap the caches.
//   - Every offset is 64-bit; strides are in elements and may be anything.
// Cost: reads and writes 2 * num_kv_heads * head_size elements per token, in parallel over tokens.
//
// Source: vLLM csrc/cache_kernels.cu::reshape_and_cache and reshape_and_cache_flash (the contract).
#pragma once

#include "ops/cpu/thread_runner.h"
#include "ops/cpu/token_copy.h"
#include "paged_kv/strided_view.h"

#include <cstdint>

namespace paged_kv::cpu {

// New tokens of one layer: [num_tokens, num_kv_heads, head_size].
struct NewTokens {
  const void* data;
  std::int64_t token_stride;
  TokenStrides strides;
};

// A cache with the logical shape [num_blocks, block_size, num_kv_heads, head_size].
struct FlashCache {
  void* data;
  std::int64_t block_stride;
  std::int64_t offset_stride;  // from one token of a block to the next
  TokenStrides strides;
};

struct ReshapeAndCacheFlashParams {
  NewTokens key;
  NewTokens value;
  FlashCache key_cache;
  FlashCache value_cache;
  VectorView<const std::int64_t> slot_mapping;  // [num_tokens]
  std::int64_t num_blocks;
  std::int64_t block_size;
  std::int64_t num_kv_heads;
  std::int64_t head_size;
  std::int64_t element_size;  // bytes: 2 or 4
};

// [num_blocks, num_kv_heads, head_size / x, block_size, x]
struct PackedKeyCache {
  void* data;
  std::int64_t block_stride;
  std::int64_t head_stride;
  std::int64_t chunk_stride;
  std::int64_t offset_stride;
  std::int64_t lane_stride;
};

// [num_blocks, num_kv_heads, head_size, block_size]
struct PackedValueCache {
  void* data;
  std::int64_t block_stride;
  std::int64_t head_stride;
  std::int64_t dim_stride;
  std::int64_t offset_stride;
};

struct ReshapeAndCacheParams {
  NewTokens key;
  NewTokens value;
  PackedKeyCache key_cache;
  PackedValueCache value_cache;
  VectorView<const std::int64_t> slot_mapping;  // [num_tokens]
  std::int64_t num_blocks;
  std::int64_t block_size;
  std::int64_t num_kv_heads;
  std::int64_t head_size;  // a multiple of x
  std::int64_t x;          // 16 bytes' worth of elements
  std::int64_t element_size;
};

void reshape_and_cache(const ReshapeAndCacheParams& params, const ThreadRunner& runner);
void reshape_and_cache_flash(const ReshapeAndCacheFlashParams& params, const ThreadRunner& runner);

// Throws std::invalid_argument naming the first slot that is >= num_slots.
void check_slots(VectorView<const std::int64_t> slot_mapping, std::int64_t num_slots);

}  // namespace paged_kv::cpu
