// SPDX-License-Identifier: Apache-2.0
//
// The cache layout `panels`, for attention on a CPU. The keys, or values, of one head of one block
// lie in groups of 16 tokens, one after the other; a group is 16 * head_size elements in the order
// in which vectors multiply them. x = 1:
//
//   keys of a group     ┌ dim 0 ───────────┬ dim 1 ───────────┬ ...
//                       │ t0 t1 t2 ... t15 │ t0 t1 t2 ... t15 │
//
//   values of a group   ┌ dims 0 to 15 ──────────────────────────────────┬ dims 16 to 31 ──────
//                       │ t0: d0 ... d15 │ t1: d0 ... d15 │ ... │ t15:   │ t0: d16 ... d31 │ ...
//
// Of bfloat16, x = 2 elements that are summed one after the other lie side by side, so that a shift
// and a mask make two vectors of floats of one of pairs: the same dims 2i and 2i + 1 of a key, the
// same dim of values 2i and 2i + 1.
//
//   keys of a group     ┌ dims 0 and 1 ─────────────────────────────┬ dims 2 and 3 ──────
//                       │ t0: d0 d1 │ t1: d0 d1 │ ... │ t15: d0 d1  │ t0: d2 d3 │ ...
//
//   values of a group   ┌ dims 0 to 15 ──────────────────────────────────────────────────┬ ...
//                       │ t0 t1: d0 d0, d1 d1, ..., d15 d15 │ t2 t3: d0 d0, d1 d1, ... │ ...
//
//   key cache    [num_blocks, num_kv_heads, block_size / 16, head_size / x, 16, x]
//   value cache  [num_blocks, num_kv_heads, block_size / 16, head_size / 16, 16 / x, 16, x]
#pragma once

#include "ops/params/float_dtype.h"
#include "ops/params/kv_cache_dtype.h"

#include <cstdint>

namespace paged_kv {

// block_size is a multiple of the one, head_size of the other.
inline constexpr std::int64_t kPanelTokens = 16;
inline constexpr std::int64_t kPanelDims = 16;

// What a tensor holds panels of, if it does: the order of their elements differs.
enum class CachePanels { kNone, kKeys, kValues };

// x, the elements that lie side by side. `dtype` is that of keys and values outside of the cache.
[[nodiscard]] constexpr std::int64_t panel_x(FloatDtype dtype,
                                             KvCacheDtype kv_cache_dtype) noexcept {
  return kv_cache_dtype == KvCacheDtype::kAuto && dtype == FloatDtype::kBFloat16 ? 2 : 1;
}

// Where element (token, dim) of a head of a block lies, in elements from the head's first.
[[nodiscard]] constexpr std::int64_t key_panel_element(std::int64_t token, std::int64_t dim,
                                                       std::int64_t head_size,
                                                       std::int64_t x) noexcept {
  const std::int64_t lane = token % kPanelTokens;
  return (token - lane) * head_size + dim / x * kPanelTokens * x + lane * x + dim % x;
}

[[nodiscard]] constexpr std::int64_t value_panel_element(std::int64_t token, std::int64_t dim,
                                                         std::int64_t head_size,
                                                         std::int64_t x) noexcept {
  const std::int64_t row = token % kPanelTokens;
  const std::int64_t lane = dim % kPanelDims;
  return (token - row) * head_size + (dim - lane) * kPanelTokens + row / x * kPanelDims * x +
         lane * x + row % x;
}

}  // namespace paged_kv
