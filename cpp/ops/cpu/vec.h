// SPDX-License-Identifier: Apache-2.0
//
// Eight floats that the compiler maps to whatever registers the target has. The number of lanes is
// part of the numerics: sums over lanes have one order on every machine.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

namespace paged_kv::cpu {

inline constexpr int kLanes = 8;
using Vec = float __attribute__((vector_size(kLanes * sizeof(float))));
using IntVec = std::int32_t __attribute__((vector_size(kLanes * sizeof(std::int32_t))));

// Unaligned.
[[nodiscard]] inline Vec load(const float* source) noexcept {
  Vec result;
  std::memcpy(&result, source, sizeof(result));
  return result;
}

inline void store(float* target, Vec value) noexcept { std::memcpy(target, &value, sizeof(value)); }

[[nodiscard]] inline Vec broadcast(float x) noexcept { return Vec{} + x; }

[[nodiscard]] inline Vec max(Vec a, Vec b) noexcept { return a > b ? a : b; }

// Sum of the lanes, as a tree.
[[nodiscard]] inline float sum_lanes(Vec v) noexcept {
  const float a = v[0] + v[4], b = v[1] + v[5], c = v[2] + v[6], d = v[3] + v[7];
  return (a + c) + (b + d);
}

[[nodiscard]] inline float max_lanes(Vec v) noexcept {
  float result = v[0];
  for (int i = 1; i < kLanes; ++i) result = v[i] > result ? v[i] : result;
  return result;
}

// e^x for x <= 88, within 2 ulp; 0 where x < -87 (-inf too); NaN stays NaN.
[[nodiscard]] inline Vec exp(Vec x) noexcept {
  constexpr float kLog2e = 1.44269504088896341f;
  constexpr float kLn2High = 0.693145751953125f;  // so few bits that n * kLn2High is exact
  constexpr float kLn2Low = 1.42860682030941723e-6f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Vec clamped = x < -87.0f ? broadcast(-87.0f) : x;
  const Vec shifted = clamped * kLog2e + kRound;
  const Vec n = shifted - kRound;
  const Vec r = (clamped - n * kLn2High) - n * kLn2Low;  // |r| <= ln(2) / 2
  // Taylor: the first term left out is below 6e-9 there.
  Vec poly = r * (1.0f / 5040) + 1.0f / 720;
  poly = poly * r + 1.0f / 120;
  poly = poly * r + 1.0f / 24;
  poly = poly * r + 1.0f / 6;
  poly = poly * r + 0.5f;
  poly = poly * r + 1.0f;
  poly = poly * r + 1.0f;
  // The low bits of `shifted` are n in two's complement: put it into the exponent.
  const IntVec exponent = (std::bit_cast<IntVec>(shifted) << 23) + (127 << 23);
  return x < -87.0f ? Vec{} : poly * std::bit_cast<Vec>(exponent);
}

[[nodiscard]] inline Vec tanh(Vec x) noexcept {
  const Vec magnitude = x < 0.0f ? -x : x;
  // Beyond 20 the result is 1 to the last bit, and exp() would overflow.
  const Vec bounded = magnitude > 20.0f ? broadcast(20.0f) : magnitude;
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

}  // namespace paged_kv::cpu
