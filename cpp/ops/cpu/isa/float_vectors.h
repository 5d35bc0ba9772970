// SPDX-License-Identifier: Apache-2.0
//
// Vectors of floats in memory, for any instruction set V: see attention_kernels_impl.h.
#pragma once

#include "ops/cpu/element_type.h"

#include <stdint.h>

namespace paged_kv::cpu {

template <class V>
struct FloatVectors {
  using Vec = typename V::Vec;

  [[gnu::always_inline]] static Vec load(const float* p) {
    return V::template load_as_float<ElementType::kFloat>(p);
  }
  [[gnu::always_inline]] static void store(float* p, Vec v) {
    V::template store_as<ElementType::kFloat>(p, v);
  }

  // The sum of the lanes, as sum4() adds them.
  [[gnu::always_inline]] static float sum_lanes(Vec v) {
    float sums[4];
    V::sum4(v, v, v, v, sums);
    return sums[0];
  }
};

namespace {  // no part of it names V: it must not be shared between instruction sets

// Element i of a row.
template <ElementType kType>
[[gnu::always_inline]] inline const char* element(const void* row, int64_t i) {
  return static_cast<const char*>(row) + i * element_size(kType);
}

}  // namespace
}  // namespace paged_kv::cpu
