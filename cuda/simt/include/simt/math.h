// SPDX-License-Identifier: Apache-2.0
//
// Device functions that a host compiler lacks: fast math, bit operations, cached loads.
//
// Where the device approximates (ex2, lg2, rcp, rsqrt: about 2 ulp), these are correctly rounded or
// nearly so: results differ from a GPU's in the last bits, never in structure.
#pragma once

#include "simt/thread.h"

#include <bit>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <type_traits>

// expf through 2^x, so that the error grows with |x| as it does on the device.
inline float __expf(float x) { return exp2f(x * 1.442695041f); }
inline float __exp10f(float x) { return exp2f(x * 3.321928095f); }
inline float __log2f(float x) { return log2f(x); }
inline float __logf(float x) { return log2f(x) * 0.693147181f; }
inline float __powf(float x, float y) { return exp2f(y * log2f(x)); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanhf(float x) { return tanhf(x); }
// The device gives 0 for a divisor of 2^126 or more.
inline float __fdividef(float x, float y) {
  return std::fabs(y) > 0x1p126f && std::fabs(y) < INFINITY ? x * 0.0f : x / y;
}
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __frsqrt_rn(float x) { return static_cast<float>(1.0 / std::sqrt(double{x})); }

inline int __float2int_rn(float x) { return static_cast<int>(std::lrint(x)); }
inline int __float2int_rz(float x) { return static_cast<int>(x); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }

inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return std::countl_zero(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __umulhi(unsigned x, unsigned y) {
  return static_cast<unsigned>((std::uint64_t{x} * y) >> 32);
}
inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int bit = 0; bit < 32; ++bit) reversed |= ((x >> bit) & 1u) << (31 - bit);
  return reversed;
}
// Byte i of the result is byte `selector nibble i` of the 8 bytes y:x.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const std::uint64_t bytes = (std::uint64_t{y} << 32) | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned index = (selector >> (4 * i)) & 7u;
    result |= static_cast<unsigned>((bytes >> (8 * index)) & 0xffu) << (8 * i);
  }
  return result;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>(((std::uint64_t{high} << 32) | low) >> (shift & 31u));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((((std::uint64_t{high} << 32) | low) << (shift & 31u)) >> 32);
}

// The device has these as overloads in the global namespace.
template <class T>
  requires std::is_arithmetic_v<T>
constexpr T min(T x, std::type_identity_t<T> y) {
  return y < x ? y : x;
}
template <class T>
  requires std::is_arithmetic_v<T>
constexpr T max(T x, std::type_identity_t<T> y) {
  return x < y ? y : x;
}

// Cache hints do not change what is read. __ldg promises that nobody writes the value during the
// kernel: TSan checks that.
template <class T>
T __ldg(const T* address) {
  return *address;
}
template <class T>
T __ldcg(const T* address) {
  return *address;
}
template <class T>
T __ldcs(const T* address) {
  return *address;
}
template <class T>
void __stcg(T* address, std::type_identity_t<T> value) {
  *address = value;
}
template <class T>
void __stcs(T* address, std::type_identity_t<T> value) {
  *address = value;
}

inline void __nanosleep(unsigned) {}
[[noreturn]] inline void __trap(
    paged_kv::simt::Location location = paged_kv::simt::Location::current()) {
  paged_kv::simt::fail("__trap", location);
}
