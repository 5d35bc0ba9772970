// SPDX-License-Identifier: Apache-2.0
//
// Products with weight matrices, which are nearly all of a decoder's work besides attention.
// Weights lie in panels (isa/panel_kernels.h); each element comes from memory once for all rows of
// the input, or for 72 at least. A row's result has the same bits whatever rows come with it and
// however many threads there are.
#pragma once

#include "ops/cpu/isa/attention_kernels.h"
#include "ops/cpu/thread_runner.h"

#include <cstdint>

namespace paged_kv::cpu {

// Strides in elements; rows are dense.
struct LinearParams {
  const AttentionKernels* kernels;

  const void* x;       // [num_rows, in_features]
  const void* weight;  // ceil(out_features / kPanelFeatures) panels
  const void* bias;    // [out_features], dense, or null
  void* out;           // [num_rows, out_features]
  ElementType x_type, weight_type, bias_type, out_type;  // of the first three
  std::int64_t x_stride, out_stride;

  std::int64_t num_rows;
  std::int64_t in_features;  // a multiple of kPanelInputsUnit
  std::int64_t out_features;
};

// out = x * weight^T + bias, summed in float32 and rounded once.
// O(num_rows * in_features * out_features). One row costs what reading the weight does; from about
// 16 rows on, what the multiply-adds do.
void linear(const LinearParams& params, const ThreadRunner& runner);

}  // namespace paged_kv::cpu
