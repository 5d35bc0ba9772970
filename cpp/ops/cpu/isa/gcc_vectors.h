// SPDX-License-Identifier: Apache-2.0
//
// GCC's vectors of any number of lanes, which the compiler maps to whatever registers its target
// has. Everything is in an anonymous namespace: see attention_kernels.h.
#pragma once

#include "ops/cpu/float16.h"
#include "ops/cpu/float8.h"
#include "ops/cpu/isa/attention_kernels.h"

#include <cstring>
#include <type_traits>

namespace paged_kv::cpu {
namespace {

template <ElementType kType>
[[gnu::always_inline]] inline float element_as_float(const void* source, std::int64_t i) {
  const auto load = [&]<class T>(T x) {
    std::memcpy(&x, static_cast<const char*>(source) + i * std::int64_t{sizeof(T)}, sizeof(T));
    return to_float(x);
  };
  if constexpr (kType == ElementType::kFloat) return load(float{});
  if constexpr (kType == ElementType::kHalf) return load(Half{});
  if constexpr (kType == ElementType::kBFloat16) return load(BFloat16{});
  if constexpr (kType == ElementType::kFloat8E4M3) return load(Float8E4M3{});
  if constexpr (kType == ElementType::kFloat8E5M2) return load(Float8E5M2{});
  if constexpr (kType == ElementType::kInt8) return load(std::int8_t{});
}

// GCC applies the attribute only where T, too, is a parameter.
template <class T, int kNumLanes>
struct VectorOf {
  using type [[gnu::vector_size(kNumLanes * sizeof(T))]] = T;
};

template <int kNumLanes>
struct GccVectors {
  static constexpr std::int64_t kLanes = kNumLanes;
  template <ElementType kType>
  static constexpr bool kTakesInProducts = kType == ElementType::kFloat;
  template <ElementType kType>
  static constexpr bool kTakesAsHalf = false;
  using Vec = typename VectorOf<float, kNumLanes>::type;
  using IntVec = typename VectorOf<std::int32_t, kNumLanes>::type;
  static constexpr int kPanelSums = 4;  // each may take several registers
  static constexpr int kPanelTurn = 2;

  [[gnu::always_inline]] static Vec broadcast(float x) { return x - Vec{}; }
  [[gnu::always_inline]] static Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
  [[gnu::always_inline]] static Vec max(Vec a, Vec b) { return a > b ? a : b; }

  template <ElementType kType>
  [[gnu::always_inline]] static Vec load_as_float(const void* p) {
    Vec result;
    if constexpr (kType == ElementType::kFloat) {
      std::memcpy(&result, p, sizeof(result));
    } else {
      float elements[kLanes];
      convert<kType>(p, elements);
      std::memcpy(&result, elements, sizeof(result));
    }
    return result;
  }

  // Calls, this and the next, since these are hundreds of instructions, and loops convert several
  // vectors a turn.
  template <ElementType kType>
  [[gnu::noinline]] static void convert(const void* p, float* elements) {
    for (int i = 0; i < kLanes; ++i) elements[i] = element_as_float<kType>(p, i);
  }

  template <ElementType kType>
  static constexpr float unit() {
    return 1.0f;
  }

  template <ElementType kType>
  [[gnu::always_inline]] static void store_as(void* p, Vec v) {
    if constexpr (kType == ElementType::kFloat) {
      std::memcpy(p, &v, sizeof(v));
    } else {
      float elements[kLanes];
      std::memcpy(elements, &v, sizeof(elements));
      convert_back<kType>(elements, p);
    }
  }

  template <ElementType kType>
  [[gnu::noinline]] static void convert_back(const float* elements, void* p) {
    using T = std::conditional_t<kType == ElementType::kHalf, Half, BFloat16>;
    T converted[kLanes];
    for (int i = 0; i < kLanes; ++i) converted[i] = to<T>(elements[i]);
    std::memcpy(p, converted, sizeof(converted));
  }

  [[gnu::always_inline]] static void sum4(Vec a, Vec b, Vec c, Vec d, float* sums) {
    const Vec vectors[4] = {a, b, c, d};
    for (int i = 0; i < 4; ++i) {
      Vec v = vectors[i];
      // The upper half is added to the lower, then as in AVX2.
      for (int j = 8; j < kLanes; ++j) v[j - 8] += v[j];
      sums[i] = ((v[0] + v[2]) + (v[1] + v[3])) + ((v[4] + v[6]) + (v[5] + v[7]));
    }
  }

  template <ElementType kType>
  static void convert_chunk(const void* source, float* target) {
    constexpr std::int64_t kChunk = 16 / element_size(kType);
    for (std::int64_t i = 0; i < kChunk; ++i) target[i] = element_as_float<kType>(source, i);
  }

  template <ElementType kType>
  static void transpose_block(const char* source, std::int64_t dim_stride_bytes, float* target,
                              std::int64_t target_stride) {
    for (std::int64_t d = 0; d < 8; ++d) {
      for (std::int64_t t = 0; t < 8; ++t) {
        target[t * target_stride + d] = element_as_float<kType>(source + d * dim_stride_bytes, t);
      }
    }
  }

  template <ElementType kType>
  [[gnu::always_inline]] static void load8(const void* source, float* target) {
    for (std::int64_t i = 0; i < 8; ++i) target[i] = element_as_float<kType>(source, i);
  }

  template <int kRows>
  static constexpr int keys_per_block() {
    return kRows == 1 ? 4 : kRows == 2 ? 2 : 1;  // sixteen registers hold eight such vectors
  }
};

}  // namespace
}  // namespace paged_kv::cpu
