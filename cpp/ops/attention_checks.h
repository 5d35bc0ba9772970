// SPDX-License-Identifier: Apache-2.0
//
// What the attention ops have in common: checks of the cache and the query, and the kernel's Params
// that follow from them.
#pragma once

#include "ops/cache_panels_checks.h"
#include "ops/cpu/paged_attention.h"
#include "ops/element_types.h"
#include "ops/tensor_checks.h"

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <optional>

namespace paged_kv {

// Binds num_tokens, num_heads and head_size. Checks that out is like query.
inline void check_query(const Tensor& out, const Tensor& query, NamedSizes& sizes) {
  check(query, "query", sizes)
      .shape({"num_tokens", "num_heads", "head_size"})
      .dtype_in({ScalarType::Float, ScalarType::Half, ScalarType::BFloat16})
      .dense(-1);
  check(out, "out", sizes)
      .shape({"num_tokens", "num_heads", "head_size"})
      .dtype(query.scalar_type())
      .dense(-1)
      .writable();
  const std::int64_t head_size = sizes["head_size"];
  PAGED_KV_CHECK(head_size >= 1 && head_size <= cpu::kMaxHeadSize,
                 "query: expected a head_size in [1, ", cpu::kMaxHeadSize, "], got ", head_size);
}

// Finite also as the float32 that the kernel computes with.
inline void check_attention_scale(double scale) {
  PAGED_KV_CHECK(std::isfinite(static_cast<float>(scale)),
                 "scale: expected a finite number (as float32), got ", scale);
}

// Binds num_blocks, block_size and num_kv_heads. `dtype` is the query's.
inline void check_cache(const Tensor& key_cache, const Tensor& value_cache,
                        KvCacheDtype kv_cache_dtype, ScalarType dtype, NamedSizes& sizes) {
  if (have_panels(key_cache, value_cache)) {
    check_panel_caches(key_cache, value_cache, kv_cache_dtype, dtype, sizes);
  } else if (key_cache.dim() == 5) {
    const std::int64_t head_size = sizes["head_size"];
    const auto x = static_cast<std::int64_t>(16 / key_cache.element_size());
    PAGED_KV_CHECK(head_size % x == 0, "key_cache: this layout needs a head_size that is a ",
                   "multiple of x = ", x, ", got ", head_size);
    sizes.bind("x", x, "16 bytes");
    sizes.bind("head_size/x", head_size / x, "query");
    const std::initializer_list<const char*> key_shape = {"num_blocks", "num_kv_heads",
                                                          "head_size/x", "block_size", "x"};
    const std::initializer_list<const char*> value_shape = {"num_blocks", "num_kv_heads",
                                                            "head_size", "block_size"};
    check_cache_dtype(check(key_cache, "key_cache", sizes).shape(key_shape), kv_cache_dtype, dtype);
    check_cache_dtype(check(value_cache, "value_cache", sizes).shape(value_shape), kv_cache_dtype,
                      dtype);
  } else {
    const std::initializer_list<const char*> shape = {"num_blocks", "block_size", "num_kv_heads",
                                                      "head_size"};
    check_cache_dtype(check(key_cache, "key_cache", sizes).shape(shape), kv_cache_dtype, dtype);
    check_cache_dtype(check(value_cache, "value_cache", sizes).shape(shape), kv_cache_dtype, dtype);
  }
  PAGED_KV_CHECK(sizes["block_size"] >= 1, "key_cache: expected a block_size >= 1, got 0");
  const std::int64_t num_heads = sizes["num_heads"];
  const std::int64_t num_kv_heads = sizes["num_kv_heads"];
  PAGED_KV_CHECK(num_heads >= 1 && num_kv_heads >= 1 && num_heads % num_kv_heads == 0,
                 "query: expected num_heads to be a multiple of num_kv_heads = ", num_kv_heads,
                 ", got ", num_heads);
}

// Of a cache's elements.
[[nodiscard]] inline cpu::ElementType cache_element_type(KvCacheDtype kv_cache_dtype,
                                                         const Tensor& query) {
  switch (kv_cache_dtype) {
    case KvCacheDtype::kFloat8E4M3:
      return cpu::ElementType::kFloat8E4M3;
    case KvCacheDtype::kFloat8E5M2:
      return cpu::ElementType::kFloat8E5M2;
    case KvCacheDtype::kInt8:
      return cpu::ElementType::kInt8;
    default:
      return element_type(query);
  }
}

// Which dimension of a cache tensor is what; blocks are dimension 0.
struct CacheDims {
  std::int32_t token, head, element;
  std::int32_t chunk = -1;  // -1: all elements of a head are one chunk
};
inline constexpr CacheDims kNhdDims{.token = 1, .head = 2, .element = 3};
inline constexpr CacheDims kPackedKeyDims{.token = 3, .head = 1, .element = 4, .chunk = 2};
inline constexpr CacheDims kPackedValueDims{.token = 3, .head = 1, .element = 2};

// After check_cache().
[[nodiscard]] inline cpu::CacheSide cache_side(const Tensor& cache, const CacheDims& dims,
                                               KvScale scale) {
  const auto element_bytes = static_cast<std::int64_t>(cache.element_size());
  return {
      .data = static_cast<const std::byte*>(cache.const_data_ptr()),
      .block_stride = cache.stride(0) * element_bytes,
      .token_stride = cache.stride(dims.token) * element_bytes,
      .head_stride = cache.stride(dims.head) * element_bytes,
      .dim_stride = cache.stride(dims.element) * element_bytes,
      .chunk_size = cache.size(dims.element),
      .chunk_stride = dims.chunk < 0 ? 0 : cache.stride(dims.chunk) * element_bytes,
      .group_stride = 0,
      .scale = scale,
  };
}

// Of a cache in panels, after check_cache().
[[nodiscard]] inline cpu::CacheSide panels_side(const Tensor& cache, std::int64_t head_size,
                                                KvScale scale) {
  const auto element_bytes = static_cast<std::int64_t>(cache.element_size());
  cpu::CacheSide side{};
  side.data = static_cast<const std::byte*>(cache.const_data_ptr());
  side.block_stride = cache.stride(0) * element_bytes;
  side.head_stride = cache.stride(1) * element_bytes;
  side.group_stride = kPanelTokens * head_size * element_bytes;
  side.scale = scale;
  return side;
}

// The scales of a cache that is not quantised are not used.
struct CacheScales {
  KvScale key{}, value{};
};

// Sets the cache, the query, out and the head counts of `params`, after check_query() and
// check_cache().
inline void set_tensors(cpu::PagedAttentionParams& params, const Tensor& out, const Tensor& query,
                        const Tensor& key_cache, const Tensor& value_cache,
                        KvCacheDtype kv_cache_dtype, CacheScales scales, const NamedSizes& sizes) {
  if (kv_cache_dtype == KvCacheDtype::kAuto) scales = {};
  params.cache_type = cache_element_type(kv_cache_dtype, query);
  if (have_panels(key_cache, value_cache)) {
    params.key = panels_side(key_cache, sizes["head_size"], scales.key);
    params.value = panels_side(value_cache, sizes["head_size"], scales.value);
  } else {
    const bool is_packed = key_cache.dim() == 5;
    params.key = cache_side(key_cache, is_packed ? kPackedKeyDims : kNhdDims, scales.key);
    params.value = cache_side(value_cache, is_packed ? kPackedValueDims : kNhdDims, scales.value);
  }
  params.query_type = element_type(query);
  params.query = query.const_data_ptr();
  params.query_token_stride = query.stride(0);
  params.query_head_stride = query.stride(1);
  params.out = out.mutable_data_ptr();
  params.out_token_stride = out.stride(0);
  params.out_head_stride = out.stride(1);
  params.num_heads = sizes["num_heads"];
  params.num_kv_heads = sizes["num_kv_heads"];
  params.head_size = sizes["head_size"];
}

// The int32 metadata that all attention ops have. Binds num_seqs. query_start_loc may be null.
[[nodiscard]] inline cpu::AttentionBatch make_batch(const Tensor* query_start_loc,
                                                    const Tensor& seq_lens,
                                                    const Tensor& block_tables,
                                                    std::int64_t max_query_len,
                                                    std::int64_t max_seq_len, NamedSizes& sizes) {
  check(seq_lens, "seq_lens", sizes).shape({"num_seqs"}).dtype(ScalarType::Int);
  check(block_tables, "block_tables", sizes)
      .shape({"num_seqs", "max_blocks"})
      .dtype(ScalarType::Int);
  PAGED_KV_CHECK(max_query_len >= -1, "max_query_len: expected >= -1, got ", max_query_len);
  PAGED_KV_CHECK(max_seq_len >= -1, "max_seq_len: expected >= -1, got ", max_seq_len);
  const std::int64_t num_seqs = sizes["num_seqs"];
  cpu::AttentionBatch batch{
      .query_start_loc = {},
      .seq_lens = {seq_lens.const_data_ptr<std::int32_t>(), num_seqs, seq_lens.stride(0)},
      .block_tables = {block_tables.const_data_ptr<std::int32_t>(), num_seqs, sizes["max_blocks"],
                       block_tables.stride(0), block_tables.stride(1)},
      .num_tokens = sizes["num_tokens"],
      .num_blocks = sizes["num_blocks"],
      .block_size = sizes["block_size"],
      .max_query_len = max_query_len,
      .max_seq_len = max_seq_len,
  };
  if (query_start_loc != nullptr) {
    sizes.bind("num_seqs + 1", num_seqs + 1, "seq_lens");
    check(*query_start_loc, "query_start_loc", sizes)
        .shape({"num_seqs + 1"})
        .dtype(ScalarType::Int);
    batch.query_start_loc = {query_start_loc->const_data_ptr<std::int32_t>(), num_seqs + 1,
                             query_start_loc->stride(0)};
  }
  return batch;
}

// A float32 value for each head, or null.
struct PerHead {
  const float* data;
  std::int64_t stride;
};

[[nodiscard]] inline PerHead check_per_head(const std::optional<Tensor>& tensor, const char* name,
                                            NamedSizes& sizes) {
  if (!tensor) return {nullptr, 0};
  check(*tensor, name, sizes).shape({"num_heads"}).dtype(ScalarType::Float);
  return {tensor->const_data_ptr<float>(), tensor->stride(0)};
}

}  // namespace paged_kv
