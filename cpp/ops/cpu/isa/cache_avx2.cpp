// SPDX-License-Identifier: Apache-2.0
//
// Compiled with -mavx2 -mfma -mf16c. Wider vectors would gain nothing: memory is slower than these.
#include "ops/cpu/isa/avx2_vec8.h"
#include "ops/cpu/isa/instruction_sets.h"

namespace paged_kv::cpu {
namespace {

// float8_bits() of float8.h, eight at a time, in 32 bits each.
template <int kBias, int kMantissaBits>
[[gnu::always_inline]] inline __m256i float8_of_float(__m256 v, float largest) {
  constexpr int kDropped = 23 - kMantissaBits;
  constexpr int kRebias = (127 - kBias) << 23;
  constexpr int kAlignBits = (127 + 23 + 1 - kBias - kMantissaBits) << 23;
  const __m256i sign =
      _mm256_and_si256(_mm256_srli_epi32(_mm256_castps_si256(v), 24), _mm256_set1_epi32(0x80));
  const __m256 is_nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
  const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v);
  const __m256 magnitude = _mm256_min_ps(size, _mm256_set1_ps(largest));
  const __m256i bits = _mm256_castps_si256(magnitude);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, kDropped), _mm256_set1_epi32(1));
  const __m256i half_unit =
      _mm256_add_epi32(odd, _mm256_set1_epi32((1 << (kDropped - 1)) - 1 - kRebias));
  const __m256i normal = _mm256_srli_epi32(_mm256_add_epi32(bits, half_unit), kDropped);
  const __m256i align = _mm256_set1_epi32(kAlignBits);
  const __m256i subnormal = _mm256_sub_epi32(
      _mm256_castps_si256(_mm256_add_ps(magnitude, _mm256_castsi256_ps(align))), align);
  const __m256i is_subnormal = _mm256_cmpgt_epi32(_mm256_set1_epi32(kRebias + (1 << 23)), bits);
  const __m256i finite = _mm256_blendv_epi8(normal, subnormal, is_subnormal);
  const __m256i result =
      _mm256_blendv_epi8(finite, _mm256_set1_epi32(0x7f), _mm256_castps_si256(is_nan));
  return _mm256_or_si256(result, sign);
}

[[gnu::always_inline]] inline __m256i int8_of_float(__m256 v) {
  const __m256 number = _mm256_and_ps(v, _mm256_cmp_ps(v, v, _CMP_ORD_Q));
  const __m256 low = _mm256_min_ps(number, _mm256_set1_ps(127.0f));
  return _mm256_cvtps_epi32(_mm256_max_ps(low, _mm256_set1_ps(-128.0f)));
}

// The lowest byte of each 32 bits.
[[gnu::always_inline]] inline void store_low_bytes(void* p, __m256i v) {
  const __m256i first_bytes =
      _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4, 8, 12, -1,
                       -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m256i fours = _mm256_shuffle_epi8(v, first_bytes);
  const __m256i eight =
      _mm256_permutevar8x32_epi32(fours, _mm256_setr_epi32(0, 4, 1, 1, 1, 1, 1, 1));
  _mm_storel_epi64(static_cast<__m128i*>(p), _mm256_castsi256_si128(eight));
}

template <ElementType kType>
[[gnu::always_inline]] inline void quantize8(void* p, __m256 v) {
  if constexpr (kType == ElementType::kFloat8E4M3) {
    store_low_bytes(p, float8_of_float<7, 3>(v, 448.0f));
  } else if constexpr (kType == ElementType::kFloat8E5M2) {
    store_low_bytes(p, float8_of_float<15, 2>(v, 57344.0f));
  } else {
    store_low_bytes(p, int8_of_float(v));
  }
}

struct Rows {
  template <ElementType kFrom, ElementType kTo>
  [[gnu::always_inline]] static void convert8(const char* source, __m256 scale, char* target) {
    __m256 v = load8_as_float<kFrom>(source);
    if constexpr (kFrom == ElementType::kFloat8E4M3)
      v = _mm256_mul_ps(v, _mm256_set1_ps(kE4M3Unit));
    if constexpr (element_size(kTo) == 1) {
      quantize8<kTo>(target, _mm256_div_ps(v, scale));
    } else {
      store8_as<kTo>(target, _mm256_mul_ps(v, scale));
    }
  }

  template <ElementType kFrom, ElementType kTo>
  static void convert(const void* source, float scale, int64_t size, void* target) {
    constexpr int64_t kFromSize = element_size(kFrom);
    constexpr int64_t kToSize = element_size(kTo);
    const char* from = static_cast<const char*>(source);
    char* to = static_cast<char*>(target);
    const __m256 scales = _mm256_set1_ps(scale);
    int64_t left = size;
    for (; left >= 8; left -= 8, from += 8 * kFromSize, to += 8 * kToSize) {
      convert8<kFrom, kTo>(from, scales, to);
    }
    if (left == 0) return;
    // What lies behind the rows may not be touched.
    alignas(32) char last[32] = {};
    alignas(32) char converted[32];
    for (int64_t b = 0; b < left * kFromSize; ++b) last[b] = from[b];
    convert8<kFrom, kTo>(last, scales, converted);
    for (int64_t b = 0; b < left * kToSize; ++b) to[b] = converted[b];
  }
};

}  // namespace

constinit const CacheKernels kAvx2CacheKernels = cache_kernels_of<Rows>();

}  // namespace paged_kv::cpu
