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
    // Adding it rounds to an integer, by 1.5 * 2^23, and puts the bias of exponents below it.
    constexpr float kRound = 12582912.0f + 127.0f;
    const Vec shifted = V::fma(x, V::broadcast(kLog2e), V::broadcast(kRound));
    const Vec n = shifted - kRound;
    Vec r = V::fma(n, V::broadcast(-kLn2High), x);
    r = V::fma(n, V::broadcast(-kLn2Low), r);  // |r| <= ln(2) / 2
    // e^r: of the polynomials that begin with 1 + r, that of the least error there, 4e-9.
    Vec poly = V::fma(r, V::broadcast(1.3814596e-3f), V::broadcast(8.3687175e-3f));
    poly = V::fma(poly, r, V::broadcast(0.04166839f));
    poly = V::fma(poly, r, V::broadcast(0.16666521f));
    poly = V::fma(poly, r, V::broadcast(0.49999994f));
    poly = V::fma(poly, r, V::broadcast(1.0f));
    poly = V::fma(poly, r, V::broadcast(1.0f));
    const IntVec power = reinterpret_cast<IntVec>(shifted) << 23;  // 2^n
    return x < -87.0f ? Vec{} : poly * reinterpret_cast<Vec>(power);
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
