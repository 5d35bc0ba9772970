// SPDX-License-Identifier: Apache-2.0
//
// Gated activations (Shazeer, "GLU Variants Improve Transformer", 2020).
#pragma once

#include "ops/cpu/isa/gated_activation_kernels.h"
#include "ops/cpu/thread_runner.h"

#include <cstdint>

namespace paged_kv::cpu {

// Strides in elements; rows are dense.
struct GatedActivationParams {
  GatedActivationKernels::Row multiply_row;  // the activation's, of the elements' type
  void* out;                                 // [num_rows, size]; may be either half of `input`
  const void* input;                         // [num_rows, 2 * size]: gates, then what they let pass
  ElementType type;                          // of both
  std::int64_t out_stride, input_stride;
  std::int64_t num_rows, size;
};

// out = activation(input[:, :size]) * input[:, size:]. O(num_rows * size). A row's bits do not
// depend on the others or on threads.
void gated_activation(const GatedActivationParams& params, const ThreadRunner& runner);

}  // namespace paged_kv::cpu
