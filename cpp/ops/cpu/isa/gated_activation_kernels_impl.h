// SPDX-License-Identifier: Apache-2.0
//
// The kernels of gated_activation_kernels.h for any instruction set V: see
// attention_kernels_impl.h.
#pragma once

#include "ops/cpu/isa/elements.h"
#include "ops/cpu/isa/gated_activation_kernels.h"
#include "ops/cpu/isa/vector_math.h"

namespace paged_kv::cpu {

enum class GateActivation { kSilu, kGeluTanh };

template <class V>
struct GatedActivationKernelsFor {
  using Vec = typename V::Vec;
  static constexpr int64_t kLanes = V::kLanes;

  // x / (1 + e^-z), x and z of the same sign. NaN if x is NaN or -inf, as in torch.
  static Vec times_logistic(Vec x, Vec z) {
    // The exponent that is not positive, since e^-z overflows.
    const Vec power = VectorMath<V>::exp(z < 0.0f ? z : -z);
    return (z < 0.0f ? x * power : x) / (power + 1.0f);
  }

  template <GateActivation kActivation>
  static Vec activate(Vec x) {
    if constexpr (kActivation == GateActivation::kSilu) return times_logistic(x, x);
    // (1 + tanh(y)) / 2 is the logistic function of 2 y, and does not cancel where y < 0.
    constexpr float kTwiceSqrt2OverPi = 1.59576912160573071f;
    return times_logistic(x, (x + x * x * x * 0.044715f) * kTwiceSqrt2OverPi);
  }

  template <ElementType kType, GateActivation kActivation>
  [[gnu::always_inline]] static void multiply_vec(const char* gate, const char* up, char* out,
                                                  int64_t count) {
    using E = Elements<V, kType>;
    const Vec activated = E::rounded(activate<kActivation>(E::load(gate, count)));
    E::store(out, activated * E::load(up, count), count);
  }

  template <ElementType kType, GateActivation kActivation>
  static void multiply_row(const void* gate_row, const void* up_row, int64_t size, void* out_row) {
    constexpr int64_t kSize = element_size(kType);
    for (int64_t i = 0; i < size; i += kLanes) {
      const char* gate = static_cast<const char*>(gate_row) + i * kSize;
      const char* up = static_cast<const char*>(up_row) + i * kSize;
      char* out = static_cast<char*>(out_row) + i * kSize;
      if (i + kLanes <= size) {
        multiply_vec<kType, kActivation>(gate, up, out, kLanes);
      } else {
        multiply_vec<kType, kActivation>(gate, up, out, size - i);
      }
    }
  }

  static constexpr GatedActivationKernels table() {
    GatedActivationKernels k{};
    fill<ElementType::kFloat>(k);
    fill<ElementType::kHalf>(k);
    fill<ElementType::kBFloat16>(k);
    return k;
  }

  template <ElementType kType>
  static constexpr void fill(GatedActivationKernels& k) {
    constexpr int kIndex = static_cast<int>(kType);
    k.silu[kIndex] = &multiply_row<kType, GateActivation::kSilu>;
    k.gelu_tanh[kIndex] = &multiply_row<kType, GateActivation::kGeluTanh>;
  }
};

}  // namespace paged_kv::cpu
