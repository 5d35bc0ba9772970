// SPDX-License-Identifier: Apache-2.0
//
// How the cache kernels move elements: which conversion lies between a source and a destination,
// and short runs of elements, as one vector where memory allows that.
#pragma once

#include "ops/params/float_dtype.h"
#include "ops/params/kv_cache_dtype.h"
#include "ops/params/token_strides.h"
#include "paged_kv/cuda/dispatch.cuh"
#include "paged_kv/cuda/dtype.cuh"

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>

#include <cuda_runtime.h>

namespace paged_kv::cuda {

// Bits as they are, NaN payloads too.
template <class Bits>
struct CopyBits {
  using From = Bits;
  using To = Bits;
  static constexpr bool kHasScale = false;

  static __device__ __forceinline__ To convert(From bits, float /*scale*/) { return bits; }
};

template <Element T, Float8 Quantised>
struct Quantise {
  using From = T;
  using To = Quantised;
  static constexpr bool kHasScale = true;

  static __device__ __forceinline__ To convert(From value, float scale) {
    return from_float<To>(to_float(value) / scale);
  }
};

template <Float8 Quantised, Element T>
struct Dequantise {
  using From = Quantised;
  using To = T;
  static constexpr bool kHasScale = true;

  static __device__ __forceinline__ To convert(From value, float scale) {
    return from_float<To>(to_float(value) * scale);
  }
};

template <class Conversion>
[[nodiscard]] __device__ __forceinline__ float scale_of(const KvScale& scale, std::int64_t head) {
  if constexpr (Conversion::kHasScale) {
    return scale[head];
  } else {
    return 1.0f;
  }
}

// f<CopyBits<...>>(), or f<Converter<T, fp8>>() for a quantised cache.
template <template <class, class> class Converter, class F>
void dispatch_conversion(KvCacheDtype kv_cache_dtype, FloatDtype dtype, F&& f) {
  switch (kv_cache_dtype) {
    case KvCacheDtype::kAuto:
      return dtype == FloatDtype::kFloat ? f.template operator()<CopyBits<std::uint32_t>>()
                                         : f.template operator()<CopyBits<std::uint16_t>>();
    case KvCacheDtype::kFloat8E4M3:
      return dispatch_float_dtype(
          dtype, [&]<class T>() { f.template operator()<Converter<T, Float8E4M3>>(); });
    case KvCacheDtype::kFloat8E5M2:
      return dispatch_float_dtype(
          dtype, [&]<class T>() { f.template operator()<Converter<T, Float8E5M2>>(); });
    case KvCacheDtype::kInt8:
      throw std::invalid_argument("kv_cache_dtype: int8 caches are for the CPU");
  }
}

template <class T, int kSize>
inline constexpr int kVectorAlignment = std::min<int>(kSize * sizeof(T), 16);

template <class T, int kSize>
struct alignas(kVectorAlignment<T, kSize>) ElementVector {
  T values[kSize];
};

// `src` is aligned to kVectorAlignment.
template <class T, int kSize>
[[nodiscard]] __device__ __forceinline__ ElementVector<T, kSize> load_vector(const T* src) {
  return *reinterpret_cast<const ElementVector<T, kSize>*>(src);
}

template <class T, int kSize>
__device__ __forceinline__ void store_vector(const ElementVector<T, kSize>& elements, T* dst) {
  *reinterpret_cast<ElementVector<T, kSize>*>(dst) = elements;
}

// Elements src[0], src[stride], ...
template <class T, int kSize>
[[nodiscard]] __device__ __forceinline__ ElementVector<T, kSize> load_elements(
    const T* src, std::int64_t stride) {
  ElementVector<T, kSize> elements;
#pragma unroll
  for (int i = 0; i < kSize; ++i) elements.values[i] = src[i * stride];
  return elements;
}

template <class T, int kSize>
__device__ __forceinline__ void store_elements(const ElementVector<T, kSize>& elements, T* dst,
                                               std::int64_t stride) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) dst[i * stride] = elements.values[i];
}

// One by one, for memory that allows no vectors. Not unrolled: it shares a kernel, and so its
// registers, with the vectors.
template <class Conversion>
__device__ __forceinline__ void copy_elements(const typename Conversion::From* src,
                                              std::int64_t src_stride, typename Conversion::To* dst,
                                              std::int64_t dst_stride, int count, float scale) {
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    dst[i * dst_stride] = Conversion::convert(src[i * src_stride], scale);
  }
}

template <class Conversion, int kSize>
[[nodiscard]] __device__ __forceinline__ ElementVector<typename Conversion::To, kSize>
convert_elements(const ElementVector<typename Conversion::From, kSize>& elements, float scale) {
  ElementVector<typename Conversion::To, kSize> result;
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    result.values[i] = Conversion::convert(elements.values[i], scale);
  }
  return result;
}

// Whether each vector of kSize elements of T that starts at a multiple of `strides` (elements) from
// `data` may be accessed as one.
template <class T, int kSize>
[[nodiscard]] bool allows_vectors(const void* data, std::initializer_list<std::int64_t> strides) {
  constexpr std::int64_t kAlignment = kVectorAlignment<T, kSize>;
  const auto address = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(data));
  return address % kAlignment == 0 && std::all_of(strides.begin(), strides.end(), [](auto stride) {
           return stride * static_cast<std::int64_t>(sizeof(T)) % kAlignment == 0;
         });
}

// Likewise of rows of tokens: vectors along the dims of a head.
template <class T, int kSize>
[[nodiscard]] bool allows_vectors(const void* data, const TokenStrides& strides,
                                  std::initializer_list<std::int64_t> outer_strides) {
  return strides.dim == 1 && allows_vectors<T, kSize>(data, {strides.head}) &&
         allows_vectors<T, kSize>(data, outer_strides);
}

}  // namespace paged_kv::cuda
