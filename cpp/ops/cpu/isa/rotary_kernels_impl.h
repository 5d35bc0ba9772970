// SPDX-License-Identifier: Apache-2.0
//
// The kernels of rotary_kernels.h for any instruction set V: see attention_kernels_impl.h.
#pragma once

#include "ops/cpu/isa/elements.h"
#include "ops/cpu/isa/rotary_kernels.h"

namespace paged_kv::cpu {

template <class V>
struct RotaryKernelsFor {
  using Vec = typename V::Vec;

  // `count` elements of both halves, the second half_bytes behind the first.
  template <ElementType kType>
  [[gnu::always_inline]] static void rotate_vecs(char* head, const char* cos,
                                                 const char* signed_sin, int64_t half_bytes,
                                                 int64_t count) {
    using E = Elements<V, kType>;
    const Vec first = E::load(head, count);
    const Vec second = E::load(head + half_bytes, count);
    const auto rotated = [&](Vec x, Vec partner, int64_t offset) __attribute__((always_inline)) {
      const Vec product = E::rounded(x * E::load(cos + offset, count));
      // No fused multiply-add: it would round once less than torch.
      return product + E::rounded(partner * E::load(signed_sin + offset, count));
    };
    E::store(head, rotated(first, second, 0), count);
    E::store(head + half_bytes, rotated(second, first, half_bytes), count);
  }

  template <ElementType kType>
  static void rotate_head(void* head, const void* cos, const void* signed_sin, int64_t half_size) {
    constexpr int64_t kSize = element_size(kType);
    for (int64_t i = 0; i < half_size; i += V::kLanes) {
      char* x = static_cast<char*>(head) + i * kSize;
      const char* c = static_cast<const char*>(cos) + i * kSize;
      const char* s = static_cast<const char*>(signed_sin) + i * kSize;
      if (i + V::kLanes <= half_size) {
        rotate_vecs<kType>(x, c, s, half_size * kSize, V::kLanes);
      } else {
        rotate_vecs<kType>(x, c, s, half_size * kSize, half_size - i);
      }
    }
  }
};

}  // namespace paged_kv::cpu
