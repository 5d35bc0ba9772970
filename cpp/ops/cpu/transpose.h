// SPDX-License-Identifier: Apache-2.0
//
// Transposition of square blocks of elements in 16-byte vectors, which every target has.
#pragma once

#include "ops/cpu/strided_row.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace paged_kv::cpu {

// T: an unsigned integer of 1, 2 or 4 bytes.
template <class T>
struct TransposedBlock {
  static constexpr int kSize = 16 / sizeof(T);
  typedef T Row __attribute__((vector_size(16)));  // `using` loses the attribute of a T to come

  // dst[i * dst_stride + j] = src[j * src_stride + i] for i, j in [0, kSize); strides in bytes, any
  // addresses.
  static void copy(const std::byte* src, std::int64_t src_stride, std::byte* dst,
                   std::int64_t dst_stride) noexcept {
    Row rows[kSize];
    for (int i = 0; i < kSize; ++i) std::memcpy(&rows[i], src + i * src_stride, 16);
    // A stage takes the highest bit of an element's row to the lowest of its column, and the
    // highest of its column to the lowest of its row; after all stages the two have changed places.
    for (int stage = 1; stage < kSize; stage *= 2) {
      Row next[kSize];
      for (int i = 0; i < kSize / 2; ++i) {
        next[2 * i] = interleave<0>(rows[i], rows[i + kSize / 2], kIndices);
        next[2 * i + 1] = interleave<kSize / 2>(rows[i], rows[i + kSize / 2], kIndices);
      }
      std::memcpy(rows, next, sizeof(rows));
    }
    for (int i = 0; i < kSize; ++i) std::memcpy(dst + i * dst_stride, &rows[i], 16);
  }

  // a[0], b[0], a[1], ...: 32 bytes, of 16 each.
  static void zip(const std::byte* a, const std::byte* b, std::byte* dst) noexcept {
    Row rows[2];
    std::memcpy(&rows[0], a, 16);
    std::memcpy(&rows[1], b, 16);
    const Row zipped[2] = {interleave<0>(rows[0], rows[1], kIndices),
                           interleave<kSize / 2>(rows[0], rows[1], kIndices)};
    std::memcpy(dst, zipped, 32);
  }

 private:
  static constexpr std::make_integer_sequence<int, kSize> kIndices{};

  // a[kFirst], b[kFirst], a[kFirst + 1], ...
  template <int kFirst, int... kIndex>
  static Row interleave(Row a, Row b, std::integer_sequence<int, kIndex...>) noexcept {
    return __builtin_shufflevector(a, b, (kFirst + kIndex / 2 + kIndex % 2 * kSize)...);
  }
};

// Element i of row r, which begins at src + r * src_stride, goes to dst + i * dst_stride and there
// r elements on: whole blocks in registers, one store of 16 bytes for as many elements.
// num_elements is a multiple of TransposedBlock<T>::kSize; strides are in bytes.
template <class T>
void transpose_rows(const std::byte* src, std::int64_t src_stride, std::int64_t num_rows,
                    std::int64_t num_elements, std::byte* dst, std::int64_t dst_stride) noexcept {
  using Block = TransposedBlock<T>;
  constexpr std::int64_t kSize = sizeof(T);
  // Rows of the source may lie a multiple of 4 KiB apart, where few of them fit into a first-level
  // cache at the same time: so each line of 64 bytes is used up before the next one.
  constexpr std::int64_t kLine = 64 / kSize;
  const std::int64_t in_blocks = num_rows / Block::kSize * Block::kSize;
  for (std::int64_t line = 0; line < num_elements; line += kLine) {
    const std::int64_t line_end = std::min(line + kLine, num_elements);
    for (std::int64_t row = 0; row < in_blocks; row += Block::kSize) {
      for (std::int64_t i = line; i < line_end; i += Block::kSize) {
        Block::copy(src + row * src_stride + i * kSize, src_stride,
                    dst + i * dst_stride + row * kSize, dst_stride);
      }
    }
  }
  for (std::int64_t row = in_blocks; row < num_rows; ++row) {
    copy_strided<sizeof(T)>(src + row * src_stride, kSize, dst + row * kSize, dst_stride,
                            num_elements);
  }
}

}  // namespace paged_kv::cpu
