// SPDX-License-Identifier: Apache-2.0
//
// Stands in for CUDA's <cuda_fp16.h>. Conversions and arithmetic round once, to nearest even.
// Unlike the original, __half converts to nothing implicitly: what compiles here compiles there.
#pragma once

#include "simt/atomic.h"
#include "simt/small_float.h"
#include "simt/vector_types.h"
#include "simt/warp.h"

#include <cmath>

struct __half_raw {
  unsigned short x;
};
struct __half2_raw {
  unsigned short x, y;
};

struct __half {
  unsigned short __x;

  __half() = default;
  constexpr __half(__half_raw raw) noexcept : __x(raw.x) {}
  explicit constexpr __half(float value) noexcept : __x(paged_kv::simt::half_from_float(value)) {}
  explicit constexpr operator float() const noexcept {
    return paged_kv::simt::float_from_half(__x);
  }
  constexpr operator __half_raw() const noexcept { return {__x}; }
};
struct alignas(4) __half2 {
  __half x, y;
};
using half = __half;
using half2 = __half2;

inline __half __float2half(float x) { return __half(x); }
inline __half __float2half_rn(float x) { return __half(x); }
inline float __half2float(__half x) { return static_cast<float>(x); }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half2 __half2half2(__half x) { return {x, x}; }
inline __half2 __float2half2_rn(float x) { return {__half(x), __half(x)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline __half2 __float22half2_rn(float2 v) { return {__half(v.x), __half(v.y)}; }
inline float2 __half22float2(__half2 v) { return {__half2float(v.x), __half2float(v.y)}; }
inline __half __low2half(__half2 v) { return v.x; }
inline __half __high2half(__half2 v) { return v.y; }
inline float __low2float(__half2 v) { return __half2float(v.x); }
inline float __high2float(__half2 v) { return __half2float(v.y); }
inline unsigned short __half_as_ushort(__half x) { return x.__x; }
inline __half __ushort_as_half(unsigned short bits) { return __half(__half_raw{bits}); }

// float holds every sum, and every product, of two halves exactly enough: rounding it to half
// rounds the exact result (24 >= 2 * 11 + 2 bits; Figueroa 1995).
inline __half __hadd(__half a, __half b) { return __half(__half2float(a) + __half2float(b)); }
inline __half __hsub(__half a, __half b) { return __half(__half2float(a) - __half2float(b)); }
inline __half __hmul(__half a, __half b) { return __half(__half2float(a) * __half2float(b)); }
inline __half __hdiv(__half a, __half b) { return __half(__half2float(a) / __half2float(b)); }
inline __half __hneg(__half a) {
  return __ushort_as_half(static_cast<unsigned short>(a.__x ^ 0x8000u));
}
inline __half __habs(__half a) {
  return __ushort_as_half(static_cast<unsigned short>(a.__x & 0x7fffu));
}
inline bool __hisnan(__half a) { return (a.__x & 0x7fffu) > 0x7c00u; }
inline bool __heq(__half a, __half b) { return __half2float(a) == __half2float(b); }
inline bool __hlt(__half a, __half b) { return __half2float(a) < __half2float(b); }
inline bool __hgt(__half a, __half b) { return __half2float(a) > __half2float(b); }
// The number, if one is NaN.
inline __half __hmax(__half a, __half b) {
  return __half(std::fmax(__half2float(a), __half2float(b)));
}
inline __half __hmin(__half a, __half b) {
  return __half(std::fmin(__half2float(a), __half2float(b)));
}
inline __half2 __hadd2(__half2 a, __half2 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }
inline __half2 __hsub2(__half2 a, __half2 b) { return {__hsub(a.x, b.x), __hsub(a.y, b.y)}; }
inline __half2 __hmul2(__half2 a, __half2 b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }

inline __half operator+(__half a, __half b) { return __hadd(a, b); }
inline __half operator-(__half a, __half b) { return __hsub(a, b); }
inline __half operator*(__half a, __half b) { return __hmul(a, b); }
inline __half operator/(__half a, __half b) { return __hdiv(a, b); }
inline __half operator-(__half a) { return __hneg(a); }
inline bool operator==(__half a, __half b) { return __heq(a, b); }
inline bool operator<(__half a, __half b) { return __hlt(a, b); }
inline bool operator>(__half a, __half b) { return __hgt(a, b); }

template <>
inline constexpr bool paged_kv::simt::kIsShuffleValue<__half> = true;
template <>
inline constexpr bool paged_kv::simt::kIsShuffleValue<__half2> = true;
template <>
inline constexpr bool paged_kv::simt::kIsAtomicFloat<__half> = true;

// Each half is one atomic; the pair is not.
inline __half2 atomicAdd(__half2* address, __half2 value) {
  const __half x = atomicAdd(&address->x, value.x);
  return {x, atomicAdd(&address->y, value.y)};
}
