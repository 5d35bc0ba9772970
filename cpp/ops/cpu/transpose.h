// SPDX-License-Identifier: Apache-2.0
//
// Transposition of square blocks of elements in 16-byte vectors, which every target has.
#pragma once

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

 private:
  static constexpr std::make_integer_sequence<int, kSize> kIndices{};

  // a[kFirst], b[kFirst], a[kFirst + 1], ...
  template <int kFirst, int... kIndex>
  static Row interleave(Row a, Row b, std::integer_sequence<int, kIndex...>) noexcept {
    return __builtin_shufflevector(a, b, (kFirst + kIndex / 2 + kIndex % 2 * kSize)...);
  }
};

}  // namespace paged_kv::cpu
