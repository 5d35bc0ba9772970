// SPDX-License-Identifier: Apache-2.0
//
// Functions of float vectors, for any instruction set V: see attention_kernels_impl.h.
#pragma once

#include <stdint.h>

namespace paged_kv::cpu {

template <class V>
struct VectorMath {
  using Vec = typename V::Vec;
  using IntVec = typename V::IntVec;

  // e^x for x <= 88, within 2 ulp; 0 where x < -87 (-inf too); NaN stays NaN.
  static Vec exp(Vec x) {
    constexpr float kLog2e = 1.44269504088896341f;
    constexpr float kLn2High = 0.693145751953125f;  // so few bits that n * kLn2High is exact
    constexpr float kLn2Low = 1.42860682030941723e-6f;
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const Vec clamped = V::max(V::broadcast(-87.0f), x);  // NaN stays: it is the second argument
    const Vec shifted = V::fma(clamped, V::broadcast(kLog2e), V::broadcast(kRound));
    const Vec n = shifted - kRound;
    Vec r = V::fma(n, V::broadcast(-kLn2High), clamped);
    r = V::fma(n, V::broadcast(-kLn2Low), r);  // |r| <= ln(2) / 2
    // Taylor: the first term left out is below 6e-9 there.
    Vec poly = V::fma(r, V::broadcast(1.0f / 5040), V::broadcast(1.0f / 720));
    poly = V::fma(poly, r, V::broadcast(1.0f / 120));
    poly = V::fma(poly, r, V::broadcast(1.0f / 24));
    poly = V::fma(poly, r, V::broadcast(1.0f / 6));
    poly = V::fma(poly, r, V::broadcast(0.5f));
    poly = V::fma(poly, r, V::broadcast(1.0f));
    poly = V::fma(poly, r, V::broadcast(1.0f));
    // The low bits of `shifted` are n in two's complement: put it into the exponent.
    const IntVec exponent = (reinterpret_cast<IntVec>(shifted) << 23) + (127 << 23);
    return x < -87.0f ? Vec{} : poly * reinterpret_cast<Vec>(exponent);
  }

  static Vec tanh(Vec x) {
    const Vec magnitude = x < 0.0f ? -x : x;
    // Beyond 20 the result is 1 to the last bit, and exp() would overflow.
    const Vec bounded = magnitude > 20.0f ? V::broadcast(20.0f) : magnitude;
    const Vec large = 1.0f - 2.0f / (exp(2.0f * bounded) + 1.0f);
    // Taylor below 1/4, where the line above cancels.
    const Vec square = x * x;
    Vec poly = square * (62.0f / 2835) - 17.0f / 315;
    poly = poly * square + 2.0f / 15;
    poly = poly * square - 1.0f / 3;
    const Vec small = magnitude + magnitude * square * poly;
    const Vec result = magnitude < 0.25f ? small : large;
    return x < 0.0f ? -result : result;
  }

  static float exp(float x) { return exp(V::broadcast(x))[0]; }
};

}  // namespace paged_kv::cpu
