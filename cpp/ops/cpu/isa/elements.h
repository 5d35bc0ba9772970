// SPDX-License-Identifier: Apache-2.0
//
// Vectors of elements of one type, for any instruction set V: see attention_kernels_impl.h.
#pragma once

#include "ops/cpu/element_type.h"

#include <stdint.h>

namespace paged_kv::cpu {

template <class V, ElementType kType>
struct Elements {
  using Vec = typename V::Vec;
  static constexpr int64_t kLanes = V::kLanes;

  // The first `count` elements at p, then zeros; what lies behind them is not touched.
  [[gnu::always_inline]] static Vec load(const char* p, int64_t count) {
    if (count == kLanes) return V::template load_as_float<kType>(p);
    alignas(64) char bytes[kLanes * element_size(kType)] = {};
    for (int64_t b = 0; b < count * element_size(kType); ++b) bytes[b] = p[b];
    return V::template load_as_float<kType>(bytes);
  }

  [[gnu::always_inline]] static void store(char* p, Vec v, int64_t count) {
    if (count == kLanes) return V::template store_as<kType>(p, v);
    alignas(64) char bytes[kLanes * element_size(kType)];
    V::template store_as<kType>(bytes, v);
    for (int64_t b = 0; b < count * element_size(kType); ++b) p[b] = bytes[b];
  }

  // v rounded to the type, to nearest even.
  [[gnu::always_inline]] static Vec rounded(Vec v) {
    if constexpr (kType == ElementType::kFloat) return v;
    if constexpr (kType == ElementType::kBFloat16) {  // a third of the work of store and load
      const auto bits = reinterpret_cast<typename V::IntVec>(v);
      const auto half_unit = ((bits >> 16) & 1) + 0x7fff;
      return v == v ? reinterpret_cast<Vec>((bits + half_unit) & -0x10000) : v;
    }
    alignas(64) char bytes[kLanes * element_size(kType)];
    V::template store_as<kType>(bytes, v);
    return V::template load_as_float<kType>(bytes);
  }
};

}  // namespace paged_kv::cpu
