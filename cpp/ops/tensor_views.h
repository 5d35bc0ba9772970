// SPDX-License-Identifier: Apache-2.0
//
// Tensors as the torch-free views that kernels take. The caller has checked dtype and dimensions.
#pragma once

#include "paged_kv/strided_view.h"

#include <cstdint>
#include <optional>
#include <type_traits>

#include <torch/csrc/stable/tensor.h>

namespace paged_kv {

// The elements of `tensor`, for writing unless T is const.
template <class T>
[[nodiscard]] T* data_of(const torch::stable::Tensor& tensor) {
  if constexpr (std::is_const_v<T>) {
    return static_cast<T*>(tensor.const_data_ptr());
  } else {
    return static_cast<T*>(tensor.mutable_data_ptr());
  }
}

template <class T>
[[nodiscard]] VectorView<T> vector_view(const torch::stable::Tensor& tensor) {
  return {data_of<T>(tensor), tensor.size(0), tensor.stride(0)};
}

// No tensor: a view without data.
template <class T>
[[nodiscard]] VectorView<T> vector_view(const std::optional<torch::stable::Tensor>& tensor) {
  return tensor ? vector_view<T>(*tensor) : VectorView<T>{nullptr, 0, 0};
}

template <class T>
[[nodiscard]] MatrixView<T> matrix_view(const torch::stable::Tensor& tensor) {
  return {data_of<T>(tensor), tensor.size(0), tensor.size(1), tensor.stride(0), tensor.stride(1)};
}

}  // namespace paged_kv
