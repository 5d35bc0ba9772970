// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ops/cpu/element_type.h"
#include "ops/tensor_checks.h"

namespace paged_kv {

// Of a tensor that was checked to be Float, Half or BFloat16.
[[nodiscard]] inline cpu::ElementType element_type(const Tensor& tensor) {
  switch (float_dtype(tensor)) {
    case FloatDtype::kHalf:
      return cpu::ElementType::kHalf;
    case FloatDtype::kBFloat16:
      return cpu::ElementType::kBFloat16;
    default:
      return cpu::ElementType::kFloat;
  }
}

}  // namespace paged_kv
