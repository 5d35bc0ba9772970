// SPDX-License-Identifier: Apache-2.0
//
// Moves one token's [num_heads, head_size] values between two strided places. Elements are copied
// as integers of their width, so every bit pattern (NaN payloads too) survives.
#pragma once

#include "ops/params/token_strides.h"

#include <cstdint>
#include <cstring>

namespace paged_kv::cpu {

template <class T>
class TokenCopier {
 public:
  TokenCopier(std::int64_t num_heads, std::int64_t head_size, TokenStrides src, TokenStrides dst)
      : num_heads_(num_heads), head_size_(head_size), src_(src), dst_(dst) {
    // Decided once per call and not per token: the widest run that both sides hold contiguously.
    rows_contiguous_ = src.dim == 1 && dst.dim == 1;
    const bool heads_adjacent = num_heads == 1 || (src.head == head_size && dst.head == head_size);
    if (rows_contiguous_ && heads_adjacent) {
      head_size_ = num_heads * head_size;
      num_heads_ = 1;
    }
  }

  void operator()(const T* src, T* dst) const noexcept {
    if (head_size_ == 0) {
      return;  // memcpy may not be given the null pointers of an empty tensor
    }
    for (std::int64_t head = 0; head < num_heads_; ++head) {
      const T* src_row = src + head * src_.head;
      T* dst_row = dst + head * dst_.head;
      if (rows_contiguous_) {
        std::memcpy(dst_row, src_row, static_cast<std::size_t>(head_size_) * sizeof(T));
        continue;
      }
      for (std::int64_t dim = 0; dim < head_size_; ++dim) {
        dst_row[dim * dst_.dim] = src_row[dim * src_.dim];
      }
    }
  }

 private:
  std::int64_t num_heads_;
  std::int64_t head_size_;
  TokenStrides src_;
  TokenStrides dst_;
  bool rows_contiguous_;
};

// Calls f<T>() with the unsigned integer as wide as one element: 2 bytes (float16, bfloat16) or 4
// (float32). The caller has checked the width.
template <class F>
void dispatch_element_size(std::int64_t element_size, F&& f) {
  if (element_size == 2) {
    f.template operator()<std::uint16_t>();
  } else {
    f.template operator()<std::uint32_t>();
  }
}

}  // namespace paged_kv::cpu
