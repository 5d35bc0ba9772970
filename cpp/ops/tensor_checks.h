// SPDX-License-Identifier: Apache-2.0
//
// Checks of the tensors that an op is given. Sizes have names that are bound at first use, so one
// line states a shape and that it agrees with the tensors before it:
//
//   NamedSizes sizes;
//   check(query, "query", sizes).shape({"num_tokens", "num_heads", "head_size"});
//   check(out, "out", sizes).shape({"num_tokens", "num_heads", "head_size"}).writable();
//   const std::int64_t num_heads = sizes["num_heads"];
//
// Each failure throws std::invalid_argument that names the argument, what was expected and what was
// given; PAGED_KV_BOX makes it a RuntimeError. (torch's own STD_TORCH_CHECK puts a source path in
// front of the message.) All checks of an op run before it writes anything.
#pragma once

#include "ops/params/float_dtype.h"
#include "ops/params/kv_cache_dtype.h"
#include "paged_kv/check.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

namespace paged_kv {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Where the tensors of an op lie. All of one call lie on the same device.
enum class OpDevice { kCpu, kCuda };

// Sizes by name, and the device. Holds pointers to the names: use string literals.
class NamedSizes {
 public:
  explicit NamedSizes(OpDevice device = OpDevice::kCpu) : device_(device) {}

  // The dispatcher picked the kernel because of some argument; this one may lie elsewhere.
  void bind_device(const Tensor& tensor, const char* argument) {
    if (device_ == OpDevice::kCpu) {
      PAGED_KV_CHECK(tensor.is_cpu(), argument,
                     ": expected a CPU tensor, like the other arguments");
      return;
    }
    PAGED_KV_CHECK(tensor.is_cuda(), argument,
                   ": expected a CUDA tensor, like the other arguments");
    const std::int32_t index = tensor.get_device_index();
    if (device_index_ < 0) device_index_ = index;
    PAGED_KV_CHECK(index == device_index_, argument, ": expected a tensor on cuda:", device_index_,
                   ", like the other arguments, got one on cuda:", index);
  }

  // Binds `dim` to `size`, or checks that it is bound to `size` already.
  void bind(const char* dim, std::int64_t size, const char* argument) {
    for (std::size_t i = 0; i < num_sizes_; ++i) {
      if (std::string_view(entries_[i].dim) != dim) continue;
      PAGED_KV_CHECK(entries_[i].size == size, argument, ": expected ", dim, " = ",
                     entries_[i].size, " (from ", entries_[i].argument, "), got ", size);
      return;
    }
    PAGED_KV_CHECK_AS(InvariantError, num_sizes_ < entries_.size(), "too many named sizes");
    entries_[num_sizes_++] = {dim, argument, size};
  }

  [[nodiscard]] std::int64_t operator[](std::string_view dim) const {
    for (std::size_t i = 0; i < num_sizes_; ++i) {
      if (dim == entries_[i].dim) return entries_[i].size;
    }
    throw InvariantError(concat("size ", dim, " was never bound"));
  }

 private:
  struct Entry {
    const char* dim;
    const char* argument;  // that bound it
    std::int64_t size;
  };
  OpDevice device_;
  std::int32_t device_index_ = -1;  // -1: none yet
  std::array<Entry, 16> entries_{};
  std::size_t num_sizes_ = 0;
};

template <class List>
[[nodiscard]] std::string list_string(const List& values) {
  std::string text;
  for (const std::int64_t value : values)
    text += (text.empty() ? "" : ", ") + std::to_string(value);
  return "[" + text + "]";
}

[[nodiscard]] inline std::string list_string(torch::headeronly::IntHeaderOnlyArrayRef numbers) {
  std::string text = "[";
  for (const std::int64_t number : numbers) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(number);
  }
  return text + "]";
}

[[nodiscard]] inline std::string shape_string(const Tensor& tensor) {
  return list_string(tensor.sizes());
}

// Holds references: use it within one expression.
class TensorCheck {
 public:
  TensorCheck(const Tensor& tensor, const char* name, NamedSizes& sizes)
      : tensor_(tensor), name_(name), sizes_(sizes) {
    sizes.bind_device(tensor, name);
  }

  // Number of dimensions, and each size by name.
  const TensorCheck& shape(std::initializer_list<const char*> dims) const {
    if (tensor_.dim() != static_cast<std::int64_t>(dims.size())) {
      std::string expected;
      for (const char* dim : dims) expected += (expected.empty() ? "" : ", ") + std::string(dim);
      throw std::invalid_argument(
          concat(name_, ": expected shape [", expected, "], got ", shape_string(tensor_)));
    }
    std::int64_t i = 0;
    for (const char* dim : dims) sizes_.bind(dim, tensor_.size(i++), name_);
    return *this;
  }

  const TensorCheck& dtype(ScalarType expected) const { return dtype_in({expected}); }

  const TensorCheck& dtype_in(std::initializer_list<ScalarType> expected) const {
    const ScalarType given = tensor_.scalar_type();
    for (const ScalarType candidate : expected) {
      if (candidate == given) return *this;
    }
    std::string names;
    for (const ScalarType candidate : expected) {
      names += (names.empty() ? "" : " or ") + std::string(torch::headeronly::toString(candidate));
    }
    throw std::invalid_argument(
        concat(name_, ": expected dtype ", names, ", got ", torch::headeronly::toString(given)));
  }

  // Elements of `dim` (negative: from the end) lie next to each other.
  const TensorCheck& dense(std::int64_t dim) const {
    const std::int64_t i = dim < 0 ? dim + tensor_.dim() : dim;
    PAGED_KV_CHECK(tensor_.size(i) <= 1 || tensor_.stride(i) == 1, name_, ": expected stride 1 in ",
                   "dimension ", i, ", got ", tensor_.stride(i));
    return *this;
  }

  const TensorCheck& contiguous() const {
    PAGED_KV_CHECK(tensor_.is_contiguous(), name_, ": expected a contiguous tensor, got shape ",
                   shape_string(tensor_), " with strides ", list_string(tensor_.strides()));
    return *this;
  }

  // No two elements share memory: each stride reaches past all that the smaller strides cover. True
  // of every slice, transpose and view of a dense tensor.
  const TensorCheck& writable() const {
    std::vector<std::pair<std::int64_t, std::int64_t>> steps;  // (stride, size - 1)
    for (std::int64_t i = 0; i < tensor_.dim(); ++i) {
      if (tensor_.size(i) > 1) steps.emplace_back(tensor_.stride(i), tensor_.size(i) - 1);
    }
    std::sort(steps.begin(), steps.end());
    std::int64_t covered = 0;
    for (const auto& [stride, count] : steps) {
      PAGED_KV_CHECK(stride > covered || tensor_.numel() == 0, name_,
                     ": is written, so its elements must not share memory, got strides ",
                     list_string(tensor_.strides()), " for shape ", shape_string(tensor_));
      covered += stride * count;
    }
    return *this;
  }

 private:
  const Tensor& tensor_;
  const char* name_;
  NamedSizes& sizes_;
};

[[nodiscard]] inline TensorCheck check(const Tensor& tensor, const char* name, NamedSizes& sizes) {
  return {tensor, name, sizes};
}

// int8 caches are for the CPU's kernels. `device`: whose kernels ask, also where these are
// emulated.
[[nodiscard]] inline KvCacheDtype parse_kv_cache_dtype(std::string_view kv_cache_dtype,
                                                       OpDevice device) {
  if (kv_cache_dtype == "auto") return KvCacheDtype::kAuto;
  if (kv_cache_dtype == "fp8" || kv_cache_dtype == "fp8_e4m3") return KvCacheDtype::kFloat8E4M3;
  if (kv_cache_dtype == "fp8_e5m2") return KvCacheDtype::kFloat8E5M2;
  if (kv_cache_dtype == "int8" && device == OpDevice::kCpu) return KvCacheDtype::kInt8;
  throw std::invalid_argument(
      concat("kv_cache_dtype: expected one of: auto, fp8, fp8_e4m3, fp8_e5m2",
             device == OpDevice::kCpu ? ", int8" : "", "; got '", kv_cache_dtype, "'"));
}

// Of a tensor or type that was checked to be Float, Half or BFloat16.
[[nodiscard]] inline FloatDtype float_dtype(ScalarType type) {
  switch (type) {
    case ScalarType::Half:
      return FloatDtype::kHalf;
    case ScalarType::BFloat16:
      return FloatDtype::kBFloat16;
    default:
      return FloatDtype::kFloat;
  }
}
[[nodiscard]] inline FloatDtype float_dtype(const Tensor& tensor) {
  return float_dtype(tensor.scalar_type());
}

// `dtype`: of the query, or of the new keys.
inline void check_cache_dtype(const TensorCheck& cache, KvCacheDtype kv_cache_dtype,
                              ScalarType dtype) {
  switch (kv_cache_dtype) {
    case KvCacheDtype::kAuto:
      cache.dtype(dtype);
      return;
    case KvCacheDtype::kFloat8E4M3:
      cache.dtype_in({ScalarType::Byte, ScalarType::Float8_e4m3fn});
      return;
    case KvCacheDtype::kFloat8E5M2:
      cache.dtype_in({ScalarType::Byte, ScalarType::Float8_e5m2});
      return;
    case KvCacheDtype::kInt8:
      cache.dtype(ScalarType::Char);
      return;
  }
}

// A scale of a quantised cache: one element, or one a kv head. After num_kv_heads was bound.
inline KvScale check_scale(const Tensor& scale, const char* name, NamedSizes& sizes) {
  const std::int64_t num_kv_heads = sizes["num_kv_heads"];
  check(scale, name, sizes).dtype(ScalarType::Float);
  PAGED_KV_CHECK(scale.numel() == 1 || (scale.dim() == 1 && scale.size(0) == num_kv_heads), name,
                 ": expected one element or [num_kv_heads] = [", num_kv_heads, "], got ",
                 shape_string(scale));
  return {scale.const_data_ptr<float>(), scale.numel() == 1 ? 0 : scale.stride(0)};
}

}  // namespace paged_kv
