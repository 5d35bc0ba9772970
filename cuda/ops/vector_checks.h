// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ops/tensor_checks.h"

#include <cstdint>

namespace paged_kv::cuda {

// The base pointer and every stride but the last are multiples of `num_bytes`; the last is 1.
inline void check_vectors(const Tensor& tensor, const char* name, std::int64_t num_bytes) {
  const auto element_bytes = static_cast<std::int64_t>(tensor.element_size());
  const std::int64_t last = tensor.dim() - 1;
  const auto address = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  bool is_aligned = static_cast<std::int64_t>(address) % num_bytes == 0;
  for (std::int64_t i = 0; i < last; ++i) {
    is_aligned &= tensor.size(i) <= 1 || tensor.stride(i) * element_bytes % num_bytes == 0;
  }
  PAGED_KV_CHECK(is_aligned && tensor.stride(last) == 1, name, ": expected stride 1 in the last ",
                 "dimension, and an address and other strides that are multiples of ", num_bytes,
                 " bytes, got strides ", list_string(tensor.strides()), " of ", element_bytes,
                 " bytes at an address that is ", address % static_cast<std::uintptr_t>(num_bytes),
                 " past such a multiple");
}

}  // namespace paged_kv::cuda
