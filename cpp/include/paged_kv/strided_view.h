// SPDX-License-Identifier: Apache-2.0
//
// Strided views over index tensors that the caller owns. A view lives no longer than the call it
// is passed to. Strides are in elements and may be anything, zero and negative included. All is
// constexpr, so that CUDA kernels may call it too (nvcc's --expt-relaxed-constexpr).
#pragma once

#include <cstdint>

namespace paged_kv {

template <class T>
struct VectorView {
  T* data;
  std::int64_t size;
  std::int64_t stride;

  [[nodiscard]] constexpr T& operator[](std::int64_t i) const noexcept { return data[i * stride]; }
};

template <class T>
struct MatrixView {
  T* data;
  std::int64_t num_rows;
  std::int64_t num_cols;
  std::int64_t row_stride;
  std::int64_t col_stride;

  [[nodiscard]] constexpr T& operator()(std::int64_t row, std::int64_t col) const noexcept {
    return data[row * row_stride + col * col_stride];
  }
  [[nodiscard]] constexpr VectorView<T> row(std::int64_t i) const noexcept {
    return {data + i * row_stride, num_cols, col_stride};
  }
};

}  // namespace paged_kv
