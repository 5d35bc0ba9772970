// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ops/cpu/float16.h"
#include "paged_kv/check.h"

#include <torch/headeronly/core/ScalarType.h>

namespace paged_kv {

// Calls f<T>() with the kernels' type for a torch dtype: float, Half or BFloat16.
template <class F>
void dispatch_float(torch::headeronly::ScalarType dtype, const char* argument, F&& f) {
  using torch::headeronly::ScalarType;
  switch (dtype) {
    case ScalarType::Float:
      return f.template operator()<float>();
    case ScalarType::Half:
      return f.template operator()<cpu::Half>();
    case ScalarType::BFloat16:
      return f.template operator()<cpu::BFloat16>();
    default:
      throw std::invalid_argument(concat(argument, ": expected dtype Float, Half or BFloat16, got ",
                                         torch::headeronly::toString(dtype)));
  }
}

}  // namespace paged_kv
