// SPDX-License-Identifier: Apache-2.0
//
// Checks of gather_cache's tensors, and the Params that follow from them: the same for each device.
// Values (lengths, starts, block ids) are checked by the CPU's kernel, which can read them.
#pragma once

#include "ops/cache_panels_checks.h"
#include "ops/params/gather_cache.h"
#include "ops/tensor_checks.h"
#include "ops/tensor_views.h"

#include <cstdint>
#include <optional>

namespace paged_kv {

[[nodiscard]] inline CachePanels panels_of(const Tensor& cache) {
  switch (cache.dim()) {
    case kKeyPanelsNumDims:
      return CachePanels::kKeys;
    case kValuePanelsNumDims:
      return CachePanels::kValues;
    default:
      return CachePanels::kNone;
  }
}

// Binds num_blocks, block_size, num_kv_heads and head_size, some of them to those of `out`, and
// checks the dtypes.
inline void check_gathered(const Tensor& cache, const Tensor& out, KvCacheDtype kv_cache_dtype,
                           CachePanels panels, NamedSizes& sizes) {
  const TensorCheck check_of_cache = check(cache, "cache", sizes);
  if (panels == CachePanels::kNone) {
    check_of_cache.shape({"num_blocks", "block_size", "num_kv_heads", "head_size"});
  }
  const TensorCheck check_of_out = check(out, "out", sizes);
  check_of_out.shape({"num_out_tokens", "num_kv_heads", "head_size"}).writable();
  if (kv_cache_dtype == KvCacheDtype::kAuto) {
    check_of_cache.dtype_in({ScalarType::Float, ScalarType::Half, ScalarType::BFloat16});
    check_of_out.dtype(cache.scalar_type());
  } else {
    check_of_out.dtype_in({ScalarType::Float, ScalarType::Half, ScalarType::BFloat16});
    check_cache_dtype(check_of_cache, kv_cache_dtype, out.scalar_type());
  }
  const std::int64_t x = panel_x(float_dtype(out), kv_cache_dtype);
  if (panels == CachePanels::kKeys) check_key_panels(cache, "cache", x, sizes);
  if (panels == CachePanels::kValues) check_value_panels(cache, "cache", x, sizes);
}

[[nodiscard]] inline GatherCacheParams checked_gather_cache(
    OpDevice device, KvCacheDtype kv_cache_dtype, const Tensor& cache, const Tensor& out,
    const Tensor& block_tables, const Tensor& cu_seq_lens, const std::optional<Tensor>& seq_starts,
    const std::optional<Tensor>& scale) {
  NamedSizes sizes(device);
  const CachePanels panels = panels_of(cache);
  const bool has_panels = panels != CachePanels::kNone;
  check_gathered(cache, out, kv_cache_dtype, panels, sizes);
  check(block_tables, "block_tables", sizes)
      .shape({"num_seqs", "max_blocks"})
      .dtype(ScalarType::Int);
  check(cu_seq_lens, "cu_seq_lens", sizes).shape({"num_seqs + 1"}).dtype(ScalarType::Int);
  PAGED_KV_CHECK(sizes["num_seqs + 1"] == sizes["num_seqs"] + 1, "cu_seq_lens: expected ",
                 sizes["num_seqs"] + 1, " entries, one more than block_tables has rows, got ",
                 sizes["num_seqs + 1"]);
  if (seq_starts) {
    check(*seq_starts, "seq_starts", sizes).shape({"num_seqs"}).dtype(ScalarType::Int);
  }
  KvScale kv_scale{nullptr, 0};
  if (scale) kv_scale = check_scale(*scale, "scale", sizes);
  PAGED_KV_CHECK(kv_cache_dtype == KvCacheDtype::kAuto || scale,
                 "scale: expected a tensor, as the cache is quantised, got None");
  PAGED_KV_CHECK(sizes["block_size"] > 0, "cache: expected block_size of at least 1, got 0");
  return {.cache = cache.const_data_ptr(),
          .out = out.mutable_data_ptr(),
          .block_tables = matrix_view<const std::int32_t>(block_tables),
          .cu_seq_lens = vector_view<const std::int32_t>(cu_seq_lens),
          .seq_starts = vector_view<const std::int32_t>(seq_starts),
          .num_blocks = sizes["num_blocks"],
          .block_size = sizes["block_size"],
          .num_kv_heads = sizes["num_kv_heads"],
          .head_size = sizes["head_size"],
          .block_stride = cache.stride(0),
          .offset_stride = has_panels ? 0 : cache.stride(1),
          .cache_strides = {.head = cache.stride(has_panels ? 1 : 2),
                            .dim = has_panels ? 0 : cache.stride(3)},
          .num_out_tokens = sizes["num_out_tokens"],
          .out_token_stride = out.stride(0),
          .out_strides = {.head = out.stride(1), .dim = out.stride(2)},
          .element_size = static_cast<std::int64_t>(out.element_size()),
          .dtype = float_dtype(out),
          .kv_cache_dtype = kv_cache_dtype,
          .scale = kv_scale,
          .panels = panels};
}

}  // namespace paged_kv
