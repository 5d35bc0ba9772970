// SPDX-License-Identifier: Apache-2.0
//
// Root mean square layer normalisation (Zhang and Sennrich, 2019).
#pragma once

#include "ops/cpu/thread_runner.h"

#include <cstdint>

namespace paged_kv::cpu {

// T, W: float, Half, BFloat16. Strides in elements; rows are dense.
template <class T, class W>
struct RmsNormParams {
  T* out;           // [num_rows, size]
  const T* input;   // [num_rows, size]; may be `out`
  const W* weight;  // [size]
  std::int64_t out_stride, input_stride;
  std::int64_t num_rows, size;
  float epsilon;  // added to the mean square
};

// out = weight * (input / rms), computed in float32; input / rms is rounded to W, then the product
// to T: a weight of the input's type gives the roundings that Llama was trained with, a float32
// weight those of Gemma. O(num_rows * size). A row's bits do not depend on the others or on
// threads.
template <class T, class W>
void rms_norm(const RmsNormParams<T, W>& params, const ThreadRunner& runner);

}  // namespace paged_kv::cpu
