// SPDX-License-Identifier: Apache-2.0
//
// For every CPU: loops that the compiler maps to whatever vectors its target has.
#include "ops/cpu/float16.h"
#include "ops/cpu/float8.h"
#include "ops/cpu/isa/instruction_sets.h"

#include <cstring>
#include <type_traits>

namespace paged_kv::cpu {
namespace {

template <ElementType kType>
constexpr auto zero_of() {
  if constexpr (kType == ElementType::kFloat) return float{};
  if constexpr (kType == ElementType::kHalf) return Half{};
  if constexpr (kType == ElementType::kBFloat16) return BFloat16{};
  if constexpr (kType == ElementType::kFloat8E4M3) return Float8E4M3{};
  if constexpr (kType == ElementType::kFloat8E5M2) return Float8E5M2{};
  if constexpr (kType == ElementType::kInt8) return std::int8_t{};
}

template <ElementType kType>
using ElementOf = decltype(zero_of<kType>());

struct Rows {
  template <ElementType kFrom, ElementType kTo>
  static void convert(const void* source, float scale, std::int64_t size, void* target) {
    using From = ElementOf<kFrom>;
    using To = ElementOf<kTo>;
    constexpr bool kQuantises = sizeof(To) == 1;
    // In pieces, because elements in memory may be at any address.
    constexpr std::int64_t kPiece = 64;
    From from[kPiece] = {};
    To to_elements[kPiece];
    for (std::int64_t done = 0; done < size; done += kPiece) {
      const std::int64_t left = size - done < kPiece ? size - done : kPiece;
      std::memcpy(from, static_cast<const char*>(source) + done * std::int64_t{sizeof(From)},
                  static_cast<std::size_t>(left) * sizeof(From));
      for (std::int64_t i = 0; i < kPiece; ++i) {
        const float x = to_float(from[i]);
        to_elements[i] = to<To>(kQuantises ? x / scale : x * scale);
      }
      std::memcpy(static_cast<char*>(target) + done * std::int64_t{sizeof(To)}, to_elements,
                  static_cast<std::size_t>(left) * sizeof(To));
    }
  }
};

}  // namespace

constinit const CacheKernels kScalarCacheKernels = cache_kernels_of<Rows>();

}  // namespace paged_kv::cpu
