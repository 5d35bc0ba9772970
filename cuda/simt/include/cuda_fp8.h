// SPDX-License-Identifier: Apache-2.0
//
// Stands in for CUDA's <cuda_fp8.h>.
#pragma once

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "simt/small_float.h"

using __nv_fp8_storage_t = unsigned char;
using __nv_fp8x2_storage_t = unsigned short;
enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };

inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float x, __nv_saturation_t saturate,
                                                __nv_fp8_interpretation_t format) {
  const bool saturated = saturate == __NV_SATFINITE;
  return format == __NV_E4M3 ? paged_kv::simt::e4m3_from_float(x, saturated)
                             : paged_kv::simt::e5m2_from_float(x, saturated);
}
inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 v, __nv_saturation_t saturate,
                                                     __nv_fp8_interpretation_t format) {
  const unsigned low = __nv_cvt_float_to_fp8(v.x, saturate, format);
  const unsigned high = __nv_cvt_float_to_fp8(v.y, saturate, format);
  return static_cast<__nv_fp8x2_storage_t>(low | (high << 8));
}
// Every fp8 value is a half.
inline __half_raw __nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t bits,
                                          __nv_fp8_interpretation_t format) {
  const float value = format == __NV_E4M3 ? paged_kv::simt::float_from_e4m3(bits)
                                          : paged_kv::simt::float_from_e5m2(bits);
  return {paged_kv::simt::half_from_float(value)};
}
inline __half2_raw __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t bits,
                                              __nv_fp8_interpretation_t format) {
  const auto low = static_cast<__nv_fp8_storage_t>(bits & 0xffu);
  const auto high = static_cast<__nv_fp8_storage_t>(bits >> 8);
  return {__nv_cvt_fp8_to_halfraw(low, format).x, __nv_cvt_fp8_to_halfraw(high, format).x};
}

struct __nv_fp8_e4m3 {
  __nv_fp8_storage_t __x;

  __nv_fp8_e4m3() = default;
  explicit __nv_fp8_e4m3(float value)
      : __x(__nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3)) {}
  explicit operator float() const { return paged_kv::simt::float_from_e4m3(__x); }
};
struct __nv_fp8_e5m2 {
  __nv_fp8_storage_t __x;

  __nv_fp8_e5m2() = default;
  explicit __nv_fp8_e5m2(float value)
      : __x(__nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E5M2)) {}
  explicit operator float() const { return paged_kv::simt::float_from_e5m2(__x); }
};
