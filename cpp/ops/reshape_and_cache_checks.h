// SPDX-License-Identifier: Apache-2.0
//
// Checks of the cache writers' tensors, and the Params that follow from them: the same for each
// device. Slots are checked by the CPU's kernels, which can read them.
#pragma once

#include "ops/cache_panels_checks.h"
#include "ops/params/reshape_and_cache.h"
#include "ops/tensor_checks.h"
#include "ops/tensor_views.h"

#include <cstdint>
#include <utility>

namespace paged_kv {

// The arguments of both writers.
struct WriterArguments {
  const Tensor& key;
  const Tensor& value;
  const Tensor& key_cache;
  const Tensor& value_cache;
  const Tensor& slot_mapping;
  const Tensor& k_scale;
  const Tensor& v_scale;
};

// What both writers ask of everything but the caches. Binds num_kv_heads and head_size.
inline void check_new_tokens(const WriterArguments& args, NamedSizes& sizes) {
  check(args.key, "key", sizes)
      .shape({"num_key_tokens", "num_kv_heads", "head_size"})
      .dtype_in({ScalarType::Float, ScalarType::Half, ScalarType::BFloat16});
  check(args.value, "value", sizes)
      .shape({"num_value_tokens", "num_kv_heads", "head_size"})
      .dtype(args.key.scalar_type());
  check(args.slot_mapping, "slot_mapping", sizes).shape({"num_tokens"}).dtype(ScalarType::Long);
  for (const auto& [name, num_tokens] :
       {std::pair{"key", sizes["num_key_tokens"]}, std::pair{"value", sizes["num_value_tokens"]}}) {
    PAGED_KV_CHECK(num_tokens >= sizes["num_tokens"], name, ": expected at least ",
                   sizes["num_tokens"], " tokens, one an entry of slot_mapping, got ", num_tokens);
  }
}

[[nodiscard]] inline NewTokens new_tokens(const Tensor& tensor) {
  return {.data = tensor.const_data_ptr(),
          .token_stride = tensor.stride(0),
          .strides = {.head = tensor.stride(1), .dim = tensor.stride(2)}};
}

[[nodiscard]] inline FlashCache flash_cache(const Tensor& cache) {
  return {.data = cache.mutable_data_ptr(),
          .block_stride = cache.stride(0),
          .offset_stride = cache.stride(1),
          .strides = {.head = cache.stride(2), .dim = cache.stride(3)}};
}

// Writers of packed caches.
[[nodiscard]] inline ReshapeAndCacheParams checked_reshape_and_cache(OpDevice device,
                                                                     KvCacheDtype kv_cache_dtype,
                                                                     const WriterArguments& args) {
  NamedSizes sizes(device);
  check_new_tokens(args, sizes);
  const KvScale k_scale = check_scale(args.k_scale, "k_scale", sizes);
  const KvScale v_scale = check_scale(args.v_scale, "v_scale", sizes);
  const Tensor& key_cache = args.key_cache;
  const Tensor& value_cache = args.value_cache;
  check_cache_dtype(check(key_cache, "key_cache", sizes)
                        .shape({"num_blocks", "num_kv_heads", "head_size / x", "block_size", "x"})
                        .writable(),
                    kv_cache_dtype, args.key.scalar_type());
  check_cache_dtype(check(value_cache, "value_cache", sizes)
                        .shape({"num_blocks", "num_kv_heads", "head_size", "block_size"})
                        .writable(),
                    kv_cache_dtype, args.key.scalar_type());
  const auto cache_element_size = static_cast<std::int64_t>(key_cache.element_size());
  const std::int64_t x = sizes["x"];
  PAGED_KV_CHECK(x * cache_element_size == 16, "key_cache: expected x = ", 16 / cache_element_size,
                 " elements (16 bytes) in the last dimension, got ", x);
  PAGED_KV_CHECK(sizes["head_size / x"] * x == sizes["head_size"],
                 "key_cache: expected head_size = ", sizes["head_size"],
                 " = head_size / x * x, got ", sizes["head_size / x"], " * ", x);
  return {.key = new_tokens(args.key),
          .value = new_tokens(args.value),
          .key_cache = {.data = key_cache.mutable_data_ptr(),
                        .block_stride = key_cache.stride(0),
                        .head_stride = key_cache.stride(1),
                        .chunk_stride = key_cache.stride(2),
                        .offset_stride = key_cache.stride(3),
                        .lane_stride = key_cache.stride(4)},
          .value_cache = {.data = value_cache.mutable_data_ptr(),
                          .block_stride = value_cache.stride(0),
                          .head_stride = value_cache.stride(1),
                          .dim_stride = value_cache.stride(2),
                          .offset_stride = value_cache.stride(3)},
          .slot_mapping = vector_view<const std::int64_t>(args.slot_mapping),
          .num_blocks = sizes["num_blocks"],
          .block_size = sizes["block_size"],
          .num_kv_heads = sizes["num_kv_heads"],
          .head_size = sizes["head_size"],
          .x = x,
          .element_size = static_cast<std::int64_t>(args.key.element_size()),
          .dtype = float_dtype(args.key),
          .kv_cache_dtype = kv_cache_dtype,
          .k_scale = k_scale,
          .v_scale = v_scale};
}

[[nodiscard]] inline PanelsCache panels_cache(const Tensor& cache) {
  return {.data = cache.mutable_data_ptr(),
          .block_stride = cache.stride(0),
          .head_stride = cache.stride(1)};
}

// The writer of caches in panels, which is the CPU's.
[[nodiscard]] inline ReshapeAndCachePanelsParams checked_reshape_and_cache_panels(
    KvCacheDtype kv_cache_dtype, const WriterArguments& args) {
  NamedSizes sizes(OpDevice::kCpu);
  check_new_tokens(args, sizes);
  const KvScale k_scale = check_scale(args.k_scale, "k_scale", sizes);
  const KvScale v_scale = check_scale(args.v_scale, "v_scale", sizes);
  check_panel_caches(args.key_cache, args.value_cache, kv_cache_dtype, args.key.scalar_type(),
                     sizes);
  check(args.key_cache, "key_cache", sizes).writable();
  check(args.value_cache, "value_cache", sizes).writable();
  return {.key = new_tokens(args.key),
          .value = new_tokens(args.value),
          .key_cache = panels_cache(args.key_cache),
          .value_cache = panels_cache(args.value_cache),
          .slot_mapping = vector_view<const std::int64_t>(args.slot_mapping),
          .num_blocks = sizes["num_blocks"],
          .block_size = sizes["block_size"],
          .num_kv_heads = sizes["num_kv_heads"],
          .head_size = sizes["head_size"],
          .element_size = static_cast<std::int64_t>(args.key.element_size()),
          .dtype = float_dtype(args.key),
          .kv_cache_dtype = kv_cache_dtype,
          .k_scale = k_scale,
          .v_scale = v_scale};
}

// Writers of nhd and hnd caches.
[[nodiscard]] inline ReshapeAndCacheFlashParams checked_reshape_and_cache_flash(
    OpDevice device, KvCacheDtype kv_cache_dtype, const WriterArguments& args) {
  NamedSizes sizes(device);
  check_new_tokens(args, sizes);
  const KvScale k_scale = check_scale(args.k_scale, "k_scale", sizes);
  const KvScale v_scale = check_scale(args.v_scale, "v_scale", sizes);
  for (const auto& [cache, name] :
       {std::pair{&args.key_cache, "key_cache"}, std::pair{&args.value_cache, "value_cache"}}) {
    check_cache_dtype(check(*cache, name, sizes)
                          .shape({"num_blocks", "block_size", "num_kv_heads", "head_size"})
                          .writable(),
                      kv_cache_dtype, args.key.scalar_type());
  }
  return {.key = new_tokens(args.key),
          .value = new_tokens(args.value),
          .key_cache = flash_cache(args.key_cache),
          .value_cache = flash_cache(args.value_cache),
          .slot_mapping = vector_view<const std::int64_t>(args.slot_mapping),
          .num_blocks = sizes["num_blocks"],
          .block_size = sizes["block_size"],
          .num_kv_heads = sizes["num_kv_heads"],
          .head_size = sizes["head_size"],
          .element_size = static_cast<std::int64_t>(args.key.element_size()),
          .dtype = float_dtype(args.key),
          .kv_cache_dtype = kv_cache_dtype,
          .k_scale = k_scale,
          .v_scale = v_scale};
}

}  // namespace paged_kv
