// SPDX-License-Identifier: Apache-2.0
//
// What the elements of queries, outputs and caches are.
#pragma once

#include <stdint.h>

namespace paged_kv::cpu {

// In the order of the kernel tables. Queries and outputs have one of the first three.
enum class ElementType { kFloat, kHalf, kBFloat16, kFloat8E4M3, kFloat8E5M2, kInt8 };
inline constexpr int kNumElementTypes = 6;
inline constexpr int kNumFloatTypes = 3;

[[nodiscard]] constexpr int64_t element_size(ElementType type) noexcept {
  switch (type) {
    case ElementType::kFloat:
      return 4;
    case ElementType::kHalf:
    case ElementType::kBFloat16:
      return 2;
    default:
      return 1;
  }
}

[[nodiscard]] constexpr bool is_float8(ElementType type) noexcept {
  return type == ElementType::kFloat8E4M3 || type == ElementType::kFloat8E5M2;
}

}  // namespace paged_kv::cpu
