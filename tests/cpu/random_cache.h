// SPDX-License-Identifier: Apache-2.0
//
// Caches of any layout and element type with random contents.
#pragma once

#include "element_values.h"
#include "ops/cpu/paged_attention.h"

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

namespace paged_kv::cpu::testing {

enum class Layout { kNhd, kHnd, kPacked, kStrided, kPanels };
inline constexpr int kNumLayouts = 5;

class Random {
 public:
  explicit Random(std::uint32_t seed) : engine_(seed) {}

  std::int64_t between(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(engine_);
  }
  bool one_in(std::int64_t n) { return between(1, n) == 1; }
  template <class T, std::size_t kSize>
  T one_of(const std::array<T, kSize>& values) {
    return values[static_cast<std::size_t>(between(0, kSize - 1))];
  }
  float normal() { return std::normal_distribution<float>()(engine_); }

 private:
  std::mt19937 engine_;
};

inline std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

// Bits of a finite element of ordinary size.
inline std::uint32_t random_bits(ElementType type, Random& random) {
  switch (type) {
    case ElementType::kFloat:
      return std::bit_cast<std::uint32_t>(random.normal());
    case ElementType::kHalf:
      return to<Half>(random.normal()).bits;
    case ElementType::kBFloat16:
      return to<BFloat16>(random.normal()).bits;
    case ElementType::kFloat8E4M3:  // up to 2
      return static_cast<std::uint32_t>(random.between(0, 0x40) | (random.between(0, 1) << 7));
    case ElementType::kFloat8E5M2:
      return static_cast<std::uint32_t>(random.between(0, 0x40) | (random.between(0, 1) << 7));
    case ElementType::kInt8:
      return static_cast<std::uint32_t>(random.between(0, 255));
  }
  return 0;
}

inline std::uint32_t poison_bits(ElementType type) {
  switch (type) {
    case ElementType::kFloat:
      return 0x7fc00000U;
    case ElementType::kHalf:
      return 0x7e00U;
    case ElementType::kBFloat16:
      return 0x7fc0U;
    default:
      return 0x7fU;  // NaN of both fp8 formats; int8 has none, so its largest number
  }
}

// Where dimension d of token t lies in a group of 16 tokens in panels.
[[nodiscard]] inline std::int64_t index_in_group(ElementType type, bool is_key, std::int64_t t,
                                                 std::int64_t d) {
  const std::int64_t x = type == ElementType::kBFloat16 ? 2 : 1;
  if (is_key) return (d / x * 16 + t) * x + d % x;
  return d / 16 * 256 + (t / x * 16 + d % 16) * x + t % x;
}

// Keys or values of one layer.
struct Side {
  std::vector<std::byte> memory;
  CacheSide view;
  ElementType type;
  bool is_key;

  std::byte* element(std::int64_t block, std::int64_t offset, std::int64_t head, std::int64_t d) {
    if (view.in_panels()) {
      return memory.data() + block * view.block_stride + head * view.head_stride +
             offset / 16 * view.group_stride +
             index_in_group(type, is_key, offset % 16, d) * element_size(type);
    }
    return memory.data() + block * view.block_stride + offset * view.token_stride +
           head * view.head_stride + d / view.chunk_size * view.chunk_stride +
           d % view.chunk_size * view.dim_stride;
  }
  double value(std::int64_t block, std::int64_t offset, std::int64_t head, std::int64_t d) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, element(block, offset, head, d), index(element_size(type)));
    return double{element_value(type, bits)} * double{view.scale_of(head)};
  }
};

struct Sizes {
  std::int64_t num_blocks, block_size, num_kv_heads, head_size;
};

inline Side make_side(Layout layout, bool is_key, ElementType type, const Sizes& n) {
  const std::int64_t e = element_size(type);
  Side side{};
  side.type = type;
  side.is_key = is_key;
  CacheSide& v = side.view;
  v.chunk_size = n.head_size;
  const std::int64_t x = 16 / e;
  std::int64_t per_block = n.block_size * n.num_kv_heads * n.head_size;
  switch (layout) {
    case Layout::kNhd:
      v.dim_stride = e;
      v.head_stride = n.head_size * e;
      v.token_stride = n.num_kv_heads * n.head_size * e;
      break;
    case Layout::kHnd:
      v.dim_stride = e;
      v.token_stride = n.head_size * e;
      v.head_stride = n.block_size * n.head_size * e;
      break;
    case Layout::kPacked:
      v.head_stride = n.block_size * n.head_size * e;
      if (is_key) {
        v.chunk_size = x;
        v.dim_stride = e;
        v.token_stride = x * e;
        v.chunk_stride = n.block_size * x * e;
      } else {
        v.dim_stride = n.block_size * e;
        v.token_stride = e;
      }
      break;
    case Layout::kStrided:
      v.dim_stride = 2 * e;
      v.head_stride = 2 * n.head_size * e;
      v.token_stride = 2 * n.num_kv_heads * n.head_size * e;
      per_block *= 2;
      break;
    case Layout::kPanels:
      v.group_stride = 16 * n.head_size * e;
      v.head_stride = n.block_size * n.head_size * e;
      break;
  }
  v.block_stride = per_block * e;
  side.memory.resize(index(n.num_blocks * per_block * e));
  v.data = side.memory.data();
  const std::uint32_t poison = poison_bits(type);
  for (std::size_t i = 0; i < side.memory.size(); i += index(e)) {
    std::memcpy(side.memory.data() + i, &poison, index(e));
  }
  return side;
}

}  // namespace paged_kv::cpu::testing
