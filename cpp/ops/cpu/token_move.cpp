// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/token_move.h"

#include "ops/cpu/isa/select.h"
#include "ops/cpu/strided_row.h"

#include <algorithm>
#include <cstring>

namespace paged_kv::cpu {
namespace {

TokenStrides in_bytes(TokenStrides strides, std::int64_t element_size) {
  return {strides.head * element_size, strides.dim * element_size};
}

// Indices of the tables in CacheKernels.
int index_of(FloatDtype dtype) { return static_cast<int>(dtype); }
int index_of(KvCacheDtype dtype) {
  return static_cast<int>(dtype) - static_cast<int>(KvCacheDtype::kFloat8E4M3);
}

}  // namespace

ElementConversion conversion_to_cache(FloatDtype dtype, std::int64_t element_size,
                                      KvCacheDtype kv_cache_dtype, KvScale scale) {
  if (kv_cache_dtype == KvCacheDtype::kAuto) return {nullptr, scale, element_size, element_size};
  const auto& table = cache_kernels().quantize_row;
  return {table[index_of(dtype)][index_of(kv_cache_dtype)], scale, element_size, 1};
}

ElementConversion conversion_from_cache(KvCacheDtype kv_cache_dtype, KvScale scale,
                                        FloatDtype dtype, std::int64_t element_size) {
  if (kv_cache_dtype == KvCacheDtype::kAuto) return {nullptr, scale, element_size, element_size};
  const auto& table = cache_kernels().dequantize_row;
  return {table[index_of(kv_cache_dtype)][index_of(dtype)], scale, 1, element_size};
}

TokenMover::TokenMover(const ElementConversion& conversion, std::int64_t num_heads,
                       std::int64_t head_size, TokenStrides src, TokenStrides dst)
    : conversion_(conversion),
      num_heads_(num_heads),
      head_size_(head_size),
      src_(in_bytes(src, conversion.src_element_size)),
      dst_(in_bytes(dst, conversion.dst_element_size)),
      rows_contiguous_(src.dim == 1 && dst.dim == 1) {
  // Decided once per call and not per token: the widest run that both sides hold contiguously.
  const bool heads_adjacent = num_heads == 1 || (src.head == head_size && dst.head == head_size);
  const bool one_scale = conversion.convert == nullptr || conversion.scale.stride == 0;
  if (rows_contiguous_ && heads_adjacent && one_scale) {
    head_size_ = num_heads * head_size;
    num_heads_ = 1;
  }
}

void TokenMover::operator()(const std::byte* src, std::byte* dst) const noexcept {
  for (std::int64_t head = 0; head < num_heads_; ++head) {
    move_row(src + head * src_.head, dst + head * dst_.head, head);
  }
}

void TokenMover::tokens(const std::byte* src, std::int64_t src_stride, std::byte* dst,
                        std::int64_t dst_stride, std::int64_t num_tokens) const noexcept {
  const bool one_piece = rows_contiguous_ && num_heads_ == 1 &&
                         src_stride == head_size_ * conversion_.src_element_size &&
                         dst_stride == head_size_ * conversion_.dst_element_size;
  if (one_piece) return move_contiguous(src, dst, 0, num_tokens * head_size_);
  for (std::int64_t i = 0; i < num_tokens; ++i) {
    (*this)(src + i * src_stride, dst + i * dst_stride);
  }
}

void TokenMover::move_contiguous(const std::byte* src, std::byte* dst, std::int64_t head,
                                 std::int64_t size) const noexcept {
  if (size == 0) return;  // memcpy may not be given the null pointers of an empty tensor
  if (conversion_.convert == nullptr) {
    std::memcpy(dst, src, static_cast<std::size_t>(size * conversion_.src_element_size));
  } else {
    conversion_.convert(src, conversion_.scale[head], size, dst);
  }
}

void TokenMover::move_row(const std::byte* src, std::byte* dst, std::int64_t head) const noexcept {
  if (rows_contiguous_) return move_contiguous(src, dst, head, head_size_);
  const auto [convert, scale, src_size, dst_size] = conversion_;
  if (convert == nullptr) {
    return copy_strided(src, src_.dim, dst, dst_.dim, head_size_, src_size);
  }
  constexpr std::int64_t kPiece = 64;
  std::byte from[kPiece * sizeof(float)];
  std::byte to[kPiece * sizeof(float)];
  for (std::int64_t dim = 0; dim < head_size_; dim += kPiece) {
    const std::int64_t size = std::min(kPiece, head_size_ - dim);
    copy_strided(src + dim * src_.dim, src_.dim, from, src_size, size, src_size);
    convert(from, scale[head], size, to);
    copy_strided(to, dst_size, dst + dim * dst_.dim, dst_.dim, size, dst_size);
  }
}

std::int64_t TokenMover::bytes_per_token() const noexcept {
  return num_heads_ * head_size_ *
         std::max(conversion_.src_element_size, conversion_.dst_element_size);
}

}  // namespace paged_kv::cpu
