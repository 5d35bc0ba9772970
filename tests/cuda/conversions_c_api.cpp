// SPDX-License-Identifier: Apache-2.0
//
// The conversions of paged_kv/cuda/dtype.cuh as C functions over arrays, for test_conversions.py.
#include "paged_kv/cuda/dtype.cuh"

#include <cstdint>

namespace paged_kv::cuda {
namespace {

template <class T>
void convert_from_float(const float* in, T* out, std::int64_t num_elements) {
  for (std::int64_t i = 0; i < num_elements; ++i) out[i] = from_float<T>(in[i]);
}

template <class T>
void convert_to_float(const T* in, float* out, std::int64_t num_elements) {
  for (std::int64_t i = 0; i < num_elements; ++i) out[i] = to_float(in[i]);
}

}  // namespace
}  // namespace paged_kv::cuda

#define DEFINE_CONVERSIONS(name, Type)                                                             \
  extern "C" __attribute__((visibility("default"))) void name##_from_float(                        \
      const float* in, void* out, std::int64_t num_elements) {                                     \
    paged_kv::cuda::convert_from_float(in, static_cast<paged_kv::cuda::Type*>(out), num_elements); \
  }                                                                                                \
  extern "C" __attribute__((visibility("default"))) void float_from_##name(                        \
      const void* in, float* out, std::int64_t num_elements) {                                     \
    paged_kv::cuda::convert_to_float(static_cast<const paged_kv::cuda::Type*>(in), out,            \
                                     num_elements);                                                \
  }

DEFINE_CONVERSIONS(half, Half)
DEFINE_CONVERSIONS(bfloat16, BFloat16)
DEFINE_CONVERSIONS(e4m3, Float8E4M3)
DEFINE_CONVERSIONS(e5m2, Float8E5M2)
