// SPDX-License-Identifier: Apache-2.0
//
// Rows of elements that do not lie next to each other, one by one: the slow way, for strides that
// nothing faster knows. Elements are 1, 2 or 4 bytes; strides are in bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace paged_kv::cpu {

template <std::size_t kElementSize>
void copy_strided(const std::byte* src, std::int64_t src_stride, std::byte* dst,
                  std::int64_t dst_stride, std::int64_t size) noexcept {
  for (std::int64_t i = 0; i < size; ++i) {
    std::memcpy(dst + i * dst_stride, src + i * src_stride, kElementSize);
  }
}

// dst[i * dst_stride] = src[i * src_stride] for `size` elements.
inline void copy_strided(const std::byte* src, std::int64_t src_stride, std::byte* dst,
                         std::int64_t dst_stride, std::int64_t size,
                         std::int64_t element_size) noexcept {
  switch (element_size) {
    case 1:
      return copy_strided<1>(src, src_stride, dst, dst_stride, size);
    case 2:
      return copy_strided<2>(src, src_stride, dst, dst_stride, size);
    default:
      return copy_strided<4>(src, src_stride, dst, dst_stride, size);
  }
}

}  // namespace paged_kv::cpu
