// SPDX-License-Identifier: Apache-2.0
//
// What a gated feed-forward computes between its products, as functions that each instruction set
// fills in (AttentionKernels::gated_activations). The rules of attention_kernels.h hold here too.
#pragma once

#include "ops/cpu/element_type.h"

#include <stdint.h>

namespace paged_kv::cpu {

struct GatedActivationKernels {
  // out[i] = activation(gate[i]) * up[i] for i in [0, size): dense rows at any address; `out` may
  // be one of the others. Computed in float32; the activation is rounded to the elements' type,
  // then the product.
  using Row = void (*)(const void* gate, const void* up, int64_t size, void* out);

  // x / (1 + e^-x), within 4 ulp; -0 below -87, where the exact value is above -1.5e-36.
  Row silu[kNumFloatTypes];
  // x / (1 + e^-z), z = 2 sqrt(2 / pi) (x + 0.044715 x^3), within 4 + 4 |z| ulp; -0 where z < -87.
  Row gelu_tanh[kNumFloatTypes];
};

}  // namespace paged_kv::cpu
