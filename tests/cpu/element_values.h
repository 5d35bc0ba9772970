// SPDX-License-Identifier: Apache-2.0
//
// Elements of all types, by the definitions of their formats.
#pragma once

#include "ops/cpu/element_type.h"
#include "ops/cpu/float16.h"
#include "ops/cpu/float8.h"

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace paged_kv::cpu::testing {

inline constexpr auto kElementTypes = {ElementType::kFloat,      ElementType::kHalf,
                                       ElementType::kBFloat16,   ElementType::kFloat8E4M3,
                                       ElementType::kFloat8E5M2, ElementType::kInt8};

inline constexpr auto kFloatTypes = {ElementType::kFloat, ElementType::kHalf,
                                     ElementType::kBFloat16};

// Of the element of a float type that is next to `value`.
inline std::uint32_t bits_of(ElementType type, float value) {
  if (type == ElementType::kHalf) return to<Half>(value).bits;
  if (type == ElementType::kBFloat16) return to<BFloat16>(value).bits;
  return std::bit_cast<std::uint32_t>(value);
}

// The value of an element with these bits.
inline float element_value(ElementType type, std::uint32_t bits) {
  switch (type) {
    case ElementType::kFloat:
      return std::bit_cast<float>(bits);
    case ElementType::kHalf:
      return to_float(Half{static_cast<std::uint16_t>(bits)});
    case ElementType::kBFloat16:
      return to_float(BFloat16{static_cast<std::uint16_t>(bits)});
    case ElementType::kFloat8E4M3:
      return to_float(Float8E4M3{static_cast<std::uint8_t>(bits)});
    case ElementType::kFloat8E5M2:
      return to_float(Float8E5M2{static_cast<std::uint8_t>(bits)});
    case ElementType::kInt8:
      return static_cast<float>(static_cast<std::int8_t>(bits));
  }
  return 0;
}

// Elements with the given bits, one after the other.
inline std::vector<std::byte> pack(ElementType type, const std::vector<std::uint32_t>& bits) {
  const auto size = static_cast<std::size_t>(element_size(type));
  std::vector<std::byte> result(bits.size() * size);
  for (std::size_t i = 0; i < bits.size(); ++i) {
    std::memcpy(result.data() + i * size, &bits[i], size);  // little endian
  }
  return result;
}

}  // namespace paged_kv::cpu::testing
