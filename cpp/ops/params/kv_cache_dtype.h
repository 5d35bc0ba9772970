// SPDX-License-Identifier: Apache-2.0
//
// How a cache stores keys and values.
#pragma once

#include <cstdint>

namespace paged_kv {

// The op argument kv_cache_dtype: auto, fp8 or fp8_e4m3, fp8_e5m2, int8 (CPU only). Quantised
// elements are saturate(x / scale), rounded to nearest even once; they are read as element * scale.
// int8 is -128 to 127, and 0 for NaN.
enum class KvCacheDtype {
  kAuto,  // the dtype of the query, or of the new keys: no scale
  kFloat8E4M3,
  kFloat8E5M2,
  kInt8,
};

// Scales of a quantised cache: one for all kv heads (stride 0), or one each.
struct KvScale {
  const float* data;
  std::int64_t stride;

  [[nodiscard]] constexpr float operator[](std::int64_t kv_head) const noexcept {
    return data[kv_head * stride];
  }
};

}  // namespace paged_kv
