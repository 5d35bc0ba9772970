// SPDX-License-Identifier: Apache-2.0
//
// Cache writers: put the keys and values of new tokens into their slots.
//   reshape_and_cache         layout `vllm`: x-packed keys, transposed values
//   reshape_and_cache_flash   layouts `nhd` and `hnd`, told apart by their strides alone
//   reshape_and_cache_panels  layout `panels` (cache_panels.h), on the CPU
//
// Common contract:
//   - The token count is slot_mapping.size; key and value may hold more tokens (padding).
//   - A negative slot is skipped: its key and value are not read.
//   - Two tokens with the same slot: either one wins. Key and value must not overlap the caches.
//   - Every offset is 64-bit; strides are in elements and may be anything.
//
// Source: vLLM csrc/cache_kernels.cu::reshape_and_cache and reshape_and_cache_flash (the contract).
#pragma once

#include "ops/params/cache_panels.h"
#include "ops/params/float_dtype.h"
#include "ops/params/kv_cache_dtype.h"
#include "ops/params/token_strides.h"
#include "paged_kv/strided_view.h"

#include <cstdint>

namespace paged_kv {

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
  std::int64_t element_size;  // bytes of an element of key and value: 2 or 4
  // What quantised caches need besides.
  FloatDtype dtype = FloatDtype::kFloat;  // of key and value
  KvCacheDtype kv_cache_dtype = KvCacheDtype::kAuto;
  KvScale k_scale = {nullptr, 0};
  KvScale v_scale = {nullptr, 0};
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
  std::int64_t head_size;     // a multiple of x
  std::int64_t x;             // 16 bytes' worth of elements of the cache
  std::int64_t element_size;  // as above, and so the rest
  FloatDtype dtype = FloatDtype::kFloat;
  KvCacheDtype kv_cache_dtype = KvCacheDtype::kAuto;
  KvScale k_scale = {nullptr, 0};
  KvScale v_scale = {nullptr, 0};
};

// A cache of panels; those of a head of a block follow each other.
struct PanelsCache {
  void* data;
  std::int64_t block_stride;
  std::int64_t head_stride;
};

struct ReshapeAndCachePanelsParams {
  NewTokens key;
  NewTokens value;
  PanelsCache key_cache;
  PanelsCache value_cache;
  VectorView<const std::int64_t> slot_mapping;  // [num_tokens]
  std::int64_t num_blocks;
  std::int64_t block_size;  // a multiple of kPanelTokens
  std::int64_t num_kv_heads;
  std::int64_t head_size;     // a multiple of kPanelDims
  std::int64_t element_size;  // as above, and so the rest
  FloatDtype dtype = FloatDtype::kFloat;
  KvCacheDtype kv_cache_dtype = KvCacheDtype::kAuto;
  KvScale k_scale = {nullptr, 0};
  KvScale v_scale = {nullptr, 0};
};

}  // namespace paged_kv
