// SPDX-License-Identifier: Apache-2.0
#include "ops/boxed.h"
#include "ops/cpu/reshape_and_cache.h"
#include "ops/registration.h"
#include "ops/tensor_checks.h"
#include "ops/tensor_views.h"
#include "ops/torch_thread_runner.h"

#include <cstdint>
#include <string>

namespace paged_kv {
namespace {

// What both writers ask of everything but the caches. Binds num_kv_heads and head_size.
void check_inputs(const Tensor& key, const Tensor& value, const Tensor& slot_mapping,
                  const std::string& kv_cache_dtype, const Tensor& k_scale, const Tensor& v_scale,
                  NamedSizes& sizes) {
  check_kv_cache_dtype_is_auto(kv_cache_dtype);
  check(key, "key", sizes)
      .shape({"num_key_tokens", "num_kv_heads", "head_size"})
      .dtype_in({ScalarType::Float, ScalarType::Half, ScalarType::BFloat16});
  check(value, "value", sizes)
      .shape({"num_value_tokens", "num_kv_heads", "head_size"})
      .dtype(key.scalar_type());
  check(slot_mapping, "slot_mapping", sizes).shape({"num_tokens"}).dtype(ScalarType::Long);
  check_scale(k_scale, "k_scale", sizes);
  check_scale(v_scale, "v_scale", sizes);
  for (const auto& [name, num_tokens] :
       {std::pair{"key", sizes["num_key_tokens"]}, std::pair{"value", sizes["num_value_tokens"]}}) {
    PAGED_KV_CHECK(num_tokens >= sizes["num_tokens"], name, ": expected at least ",
                   sizes["num_tokens"], " tokens, one an entry of slot_mapping, got ", num_tokens);
  }
}

cpu::NewTokens new_tokens(const Tensor& tensor) {
  return {.data = tensor.const_data_ptr(),
          .token_stride = tensor.stride(0),
          .strides = {.head = tensor.stride(1), .dim = tensor.stride(2)}};
}

cpu::FlashCache flash_cache(const Tensor& cache) {
  return {.data = cache.mutable_data_ptr(),
          .block_stride = cache.stride(0),
          .offset_stride = cache.stride(1),
          .strides = {.head = cache.stride(2), .dim = cache.stride(3)}};
}

void reshape_and_cache(const Tensor& key, const Tensor& value, const Tensor& key_cache,
                       const Tensor& value_cache, const Tensor& slot_mapping,
                       const std::string& kv_cache_dtype, const Tensor& k_scale,
                       const Tensor& v_scale) {
  NamedSizes sizes;
  check_inputs(key, value, slot_mapping, kv_cache_dtype, k_scale, v_scale, sizes);
  check(key_cache, "key_cache", sizes)
      .shape({"num_blocks", "num_kv_heads", "head_size / x", "block_size", "x"})
      .dtype(key.scalar_type())
      .writable();
  check(value_cache, "value_cache", sizes)
      .shape({"num_blocks", "num_kv_heads", "head_size", "block_size"})
      .dtype(key.scalar_type())
      .writable();
  const auto element_size = static_cast<std::int64_t>(key.element_size());
  const std::int64_t x = sizes["x"];
  PAGED_KV_CHECK(x * element_size == 16, "key_cache: expected x = ", 16 / element_size,
                 " elements (16 bytes) in the last dimension, got ", x);
  PAGED_KV_CHECK(sizes["head_size / x"] * x == sizes["head_size"],
                 "key_cache: expected head_size = ", sizes["head_size"],
                 " = head_size / x * x, got ", sizes["head_size / x"], " * ", x);
  cpu::reshape_and_cache({.key = new_tokens(key),
                          .value = new_tokens(value),
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
                          .slot_mapping = vector_view<const std::int64_t>(slot_mapping),
                          .num_blocks = sizes["num_blocks"],
                          .block_size = sizes["block_size"],
                          .num_kv_heads = sizes["num_kv_heads"],
                          .head_size = sizes["head_size"],
                          .x = x,
                          .element_size = element_size},
                         kTorchRunner);
}

void reshape_and_cache_flash(const Tensor& key, const Tensor& value, const Tensor& key_cache,
                             const Tensor& value_cache, const Tensor& slot_mapping,
                             const std::string& kv_cache_dtype, const Tensor& k_scale,
                             const Tensor& v_scale) {
  NamedSizes sizes;
  check_inputs(key, value, slot_mapping, kv_cache_dtype, k_scale, v_scale, sizes);
  const auto check_cache = [&](const Tensor& cache, const char* name) {
    check(cache, name, sizes)
        .shape({"num_blocks", "block_size", "num_kv_heads", "head_size"})
        .dtype(key.scalar_type())
        .writable();
  };
  check_cache(key_cache, "key_cache");
  check_cache(value_cache, "value_cache");
  cpu::reshape_and_cache_flash({.key = new_tokens(key),
                                .value = new_tokens(value),
                                .key_cache = flash_cache(key_cache),
                                .value_cache = flash_cache(value_cache),
                                .slot_mapping = vector_view<const std::int64_t>(slot_mapping),
                                .num_blocks = sizes["num_blocks"],
                                .block_size = sizes["block_size"],
                                .num_kv_heads = sizes["num_kv_heads"],
                                .head_size = sizes["head_size"],
                                .element_size = static_cast<std::int64_t>(key.element_size())},
                               kTorchRunner);
}

}  // namespace

PAGED_KV_CPU_OPS(m) {
  m.impl("reshape_and_cache", PAGED_KV_BOX(&reshape_and_cache));
  m.impl("reshape_and_cache_flash", PAGED_KV_BOX(&reshape_and_cache_flash));
}

}  // namespace paged_kv
