// SPDX-License-Identifier: Apache-2.0
//
// From a dtype known when a kernel is launched to a type known when it is compiled.
#pragma once

#include "ops/params/float_dtype.h"
#include "paged_kv/cuda/dtype.cuh"

namespace paged_kv::cuda {

// f<T>() with the kernels' type.
template <class F>
void dispatch_float_dtype(FloatDtype dtype, F&& f) {
  switch (dtype) {
    case FloatDtype::kFloat:
      return f.template operator()<float>();
    case FloatDtype::kHalf:
      return f.template operator()<Half>();
    case FloatDtype::kBFloat16:
      return f.template operator()<BFloat16>();
  }
}

}  // namespace paged_kv::cuda
