// SPDX-License-Identifier: Apache-2.0
//
// Moves one token's [num_heads, head_size] values between two strided places: as they are, or to or
// from the elements of a quantised cache.
#pragma once

#include "ops/cpu/isa/cache_kernels.h"
#include "ops/params/float_dtype.h"
#include "ops/params/kv_cache_dtype.h"
#include "ops/params/token_strides.h"

#include <cstddef>
#include <cstdint>

namespace paged_kv::cpu {

// How the elements of rows change on their way: not at all (`convert` is null), or by a function
// of CacheKernels, with the scale of their kv head.
struct ElementConversion {
  CacheKernels::ConvertRow convert;
  KvScale scale;
  std::int64_t src_element_size;
  std::int64_t dst_element_size;
};

// From elements of `dtype` to those of a cache; and the other way round. Throw what cache_kernels()
// throws, if the cache is quantised.
[[nodiscard]] ElementConversion conversion_to_cache(FloatDtype dtype, std::int64_t element_size,
                                                    KvCacheDtype kv_cache_dtype, KvScale scale);
[[nodiscard]] ElementConversion conversion_from_cache(KvCacheDtype kv_cache_dtype, KvScale scale,
                                                      FloatDtype dtype, std::int64_t element_size);

// Without a conversion elements are copied as bytes, so every bit pattern (NaN payloads too)
// survives.
class TokenMover {
 public:
  TokenMover(const ElementConversion& conversion, std::int64_t num_heads, std::int64_t head_size,
             TokenStrides src, TokenStrides dst);

  void operator()(const std::byte* src, std::byte* dst) const noexcept;

  // Several tokens, so many bytes apart.
  void tokens(const std::byte* src, std::int64_t src_stride, std::byte* dst,
              std::int64_t dst_stride, std::int64_t num_tokens) const noexcept;

  // The bytes of a token, where they are more.
  [[nodiscard]] std::int64_t bytes_per_token() const noexcept;

 private:
  void move_row(const std::byte* src, std::byte* dst, std::int64_t head) const noexcept;
  void move_contiguous(const std::byte* src, std::byte* dst, std::int64_t head,
                       std::int64_t size) const noexcept;

  ElementConversion conversion_;
  std::int64_t num_heads_;
  std::int64_t head_size_;
  TokenStrides src_;  // in bytes
  TokenStrides dst_;
  bool rows_contiguous_;
};

}  // namespace paged_kv::cpu
