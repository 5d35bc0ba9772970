// SPDX-License-Identifier: Apache-2.0
//
// Eight floats in an AVX2 register: loads of all element types, sums, transposition. For sources
// compiled with -mavx2 -mfma -mf16c. Everything is in an anonymous namespace: see
// attention_kernels.h.
#pragma once

#include "ops/cpu/isa/attention_kernels.h"

#include <immintrin.h>
#include <stdint.h>

namespace paged_kv::cpu {
namespace {

[[gnu::always_inline]] inline __m128i load_128(const void* p) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}

[[gnu::always_inline]] inline __m128i load_64(const void* p) {
  return _mm_loadl_epi64(static_cast<const __m128i*>(p));
}

// The exponents of e4m3 and binary16 have the biases 7 and 15: the same field is 2^-8 times as
// much.
inline constexpr float kE4M3Unit = 256.0f;

// Sixteen elements of either 8-bit float type as binary16; e4m3 in units of kE4M3Unit.
template <ElementType kType>
[[gnu::always_inline]] inline __m256i halves_of(__m128i bytes) {
  if constexpr (kType == ElementType::kFloat8E5M2) {
    return _mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8);
  } else {
    // The sign comes to bits 14 and 15, exponent and mantissa to 7 .. 13; bit 14 goes.
    const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
    const __m256i half = _mm256_and_si256(shifted, _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
    const __m256i nan_magnitude = _mm256_set1_epi16(0x3f80);  // of 0x7f and 0xff
    const __m256i magnitude = _mm256_and_si256(half, nan_magnitude);
    return _mm256_or_si256(half, _mm256_cmpeq_epi16(magnitude, nan_magnitude));
  }
}

template <ElementType kType>
[[gnu::always_inline]] inline __m256 load8_as_float(const void* p) {
  if constexpr (kType == ElementType::kFloat) {
    return _mm256_loadu_ps(static_cast<const float*>(p));
  } else if constexpr (kType == ElementType::kHalf) {
    return _mm256_cvtph_ps(load_128(p));
  } else if constexpr (kType == ElementType::kBFloat16) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_128(p)), 16));
  } else if constexpr (is_float8(kType)) {
    return _mm256_cvtph_ps(_mm256_castsi256_si128(halves_of<kType>(load_64(p))));
  } else {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_64(p)));
  }
}

// Rounded to nearest even; NaN becomes 0x7fc0.
[[gnu::always_inline]] inline __m128i bfloat16_of_float(__m256 v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i half_unit = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half_unit), 16);
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i result = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), is_nan);
  const __m256i packed = _mm256_packus_epi32(result, result);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0b1000));
}

template <ElementType kType>
[[gnu::always_inline]] inline void store8_as(void* p, __m256 v) {
  if constexpr (kType == ElementType::kFloat) {
    _mm256_storeu_ps(static_cast<float*>(p), v);
  } else if constexpr (kType == ElementType::kHalf) {
    _mm_storeu_si128(static_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  } else {
    _mm_storeu_si128(static_cast<__m128i*>(p), bfloat16_of_float(v));
  }
}

// ((l0 + l2) + (l1 + l3)) + ((l4 + l6) + (l5 + l7)) of each.
[[gnu::always_inline]] inline void sum4_of_8(__m256 a, __m256 b, __m256 c, __m256 d, float* sums) {
  const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  const __m256 low = _mm256_shuffle_ps(ab, cd, 0x44);
  const __m256 high = _mm256_shuffle_ps(ab, cd, 0xee);
  const __m256 sum = _mm256_add_ps(low, high);
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1)));
}

// rows[i][j] <-> rows[j][i]
[[gnu::always_inline]] inline void transpose_8x8(__m256 (&rows)[8]) {
  __m256 pairs[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
  __m256 quads[8];
  for (int i = 0; i < 8; i += 4) {
    quads[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
    quads[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
    quads[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
    quads[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x20);
    rows[i + 4] = _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x31);
  }
}

// What does not depend on the width of the sums: 16-byte chunks and 8 x 8 blocks.
struct Avx2Blocks {
  template <ElementType kType>
  static constexpr float unit() {
    return kType == ElementType::kFloat8E4M3 ? kE4M3Unit : 1.0f;
  }
  // The 8-bit floats become binary16 first, sixteen elements in six instructions: in the products
  // each eight elements would take five.
  template <ElementType kType>
  static constexpr bool kTakesAsHalf = is_float8(kType);
  template <ElementType kType>
  static constexpr bool kTakesInProducts = !kTakesAsHalf<kType>;

  // Rows are whole vectors of at least eight elements.
  template <ElementType kType>
  static void convert_to_half(const TokenRows& tokens, uint16_t* target) {
    for (int64_t k = tokens.begin; k < tokens.end; ++k) {
      const char* row = static_cast<const char*>(tokens.row(k));
      uint16_t* halves = target + k * tokens.size;
      int64_t d = 0;
      for (; d + 16 <= tokens.size; d += 16) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(halves + d),
                            halves_of<kType>(load_128(row + d)));
      }
      if (d == tokens.size) continue;
      _mm_storeu_si128(reinterpret_cast<__m128i*>(halves + d),
                       _mm256_castsi256_si128(halves_of<kType>(load_64(row + d))));
    }
  }

  template <ElementType kType>
  [[gnu::always_inline]] static void convert_chunk(const void* source, float* target) {
    if constexpr (kType == ElementType::kFloat) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(target), load_128(source));
    } else {
      constexpr int64_t kChunk = 16 / element_size(kType);
      for (int64_t i = 0; i < kChunk; i += 8) {
        const char* p = static_cast<const char*>(source) + i * element_size(kType);
        _mm256_storeu_ps(target + i, load8_as_float<kType>(p));
      }
    }
  }

  template <ElementType kType>
  [[gnu::always_inline]] static void transpose_block(const char* source, int64_t dim_stride_bytes,
                                                     float* target, int64_t target_stride) {
    __m256 rows[8];
    for (int i = 0; i < 8; ++i) rows[i] = load8_as_float<kType>(source + i * dim_stride_bytes);
    transpose_8x8(rows);
    for (int i = 0; i < 8; ++i) _mm256_storeu_ps(target + i * target_stride, rows[i]);
  }

  template <ElementType kType>
  [[gnu::always_inline]] static void load8(const void* source, float* target) {
    _mm256_storeu_ps(target, load8_as_float<kType>(source));
  }
};

}  // namespace
}  // namespace paged_kv::cpu
