// SPDX-License-Identifier: Apache-2.0
//
// Checks of caches in the layout `panels` (ops/params/cache_panels.h), which only the CPU's kernels
// know. A key cache has 6 dimensions, a value cache 7.
#pragma once

#include "ops/params/cache_panels.h"
#include "ops/tensor_checks.h"

#include <cstdint>
#include <initializer_list>
#include <string>

namespace paged_kv {

inline constexpr std::int64_t kKeyPanelsNumDims = 6;
inline constexpr std::int64_t kValuePanelsNumDims = 7;

// Whether a cache, of keys or of values, has the dimensions of this layout and of no other.
[[nodiscard]] inline bool has_panels(const Tensor& cache) {
  return cache.dim() == kKeyPanelsNumDims || cache.dim() == kValuePanelsNumDims;
}
// Either is enough: what is wrong with the other one, such as the two being swapped, is told in
// terms of this layout.
[[nodiscard]] inline bool have_panels(const Tensor& key_cache, const Tensor& value_cache) {
  return has_panels(key_cache) || has_panels(value_cache);
}

// For the ops on CUDA, whose kernels do not know the layout.
inline void refuse_panels(const Tensor& cache, const char* name) {
  PAGED_KV_CHECK(!has_panels(cache), name, ": the layout panels is for CPUs, got shape ",
                 shape_string(cache));
}

// `panel`: the sizes of dimension 3 and on. Binds num_blocks, num_kv_heads and block_size.
inline TensorCheck check_panels(const Tensor& cache, const char* name,
                                std::initializer_list<std::int64_t> panel, NamedSizes& sizes) {
  const TensorCheck check_of_cache = check(cache, name, sizes);
  const auto num_dims = static_cast<std::int64_t>(panel.size()) + 3;
  bool has_shape = cache.dim() == num_dims;
  for (std::int64_t dim = 3; has_shape && dim < num_dims; ++dim) {
    has_shape = cache.size(dim) == panel.begin()[dim - 3];
  }
  std::string sizes_of_panel;
  for (const std::int64_t size : panel) sizes_of_panel += concat(", ", size);
  PAGED_KV_CHECK(has_shape, name, ": expected shape [num_blocks, num_kv_heads, block_size/",
                 kPanelTokens, sizes_of_panel, "], got ", shape_string(cache));
  sizes.bind("num_blocks", cache.size(0), name);
  sizes.bind("num_kv_heads", cache.size(1), name);
  sizes.bind("block_size", cache.size(2) * kPanelTokens, name);
  std::int64_t contiguous = 1;
  for (std::int64_t dim = num_dims - 1; dim >= 2; --dim) {
    PAGED_KV_CHECK(cache.size(dim) <= 1 || cache.stride(dim) == contiguous || cache.numel() == 0,
                   name, ": expected dimensions 2 and on to be contiguous, got strides ",
                   list_string(cache.strides()), " for shape ", shape_string(cache));
    contiguous *= cache.size(dim);
  }
  return check_of_cache;
}

inline void check_panel_head_size(const char* name, std::int64_t head_size) {
  PAGED_KV_CHECK(head_size % kPanelDims == 0, name,
                 ": this layout needs a head_size that is a multiple of ", kPanelDims, ", got ",
                 head_size);
}

// After head_size was bound. `x` as panel_x() gives it.
inline TensorCheck check_key_panels(const Tensor& cache, const char* name, std::int64_t x,
                                    NamedSizes& sizes) {
  const std::int64_t head_size = sizes["head_size"];
  check_panel_head_size(name, head_size);
  return check_panels(cache, name, {head_size / x, kPanelTokens, x}, sizes);
}

inline TensorCheck check_value_panels(const Tensor& cache, const char* name, std::int64_t x,
                                      NamedSizes& sizes) {
  const std::int64_t head_size = sizes["head_size"];
  check_panel_head_size(name, head_size);
  return check_panels(cache, name, {head_size / kPanelDims, kPanelTokens / x, kPanelDims, x},
                      sizes);
}

// The caches of one layer. `dtype` is that of keys and values outside of them.
inline void check_panel_caches(const Tensor& key_cache, const Tensor& value_cache,
                               KvCacheDtype kv_cache_dtype, ScalarType dtype, NamedSizes& sizes) {
  check_cache_dtype(check(key_cache, "key_cache", sizes), kv_cache_dtype, dtype);
  check_cache_dtype(check(value_cache, "value_cache", sizes), kv_cache_dtype, dtype);
  const std::int64_t x = panel_x(float_dtype(dtype), kv_cache_dtype);
  check_key_panels(key_cache, "key_cache", x, sizes);
  check_value_panels(value_cache, "value_cache", x, sizes);
}

}  // namespace paged_kv
