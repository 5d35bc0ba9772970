// SPDX-License-Identifier: Apache-2.0
//
// Compiled with -mavx512f -mavx512bw -mavx512dq -mavx512vl and the flags of avx2.cpp.
// GCC's own intrinsics start from a value that is not initialised (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

#include "ops/cpu/isa/attention_kernels_impl.h"
#include "ops/cpu/isa/avx2_vec8.h"
#include "ops/cpu/isa/instruction_sets.h"

namespace paged_kv::cpu {
namespace {

struct Avx512 : Avx2Blocks {
  static constexpr int64_t kLanes = 16;
  using Vec = __m512;
  using IntVec = int32_t __attribute__((vector_size(64)));
  static constexpr int kPanelSums = 12;  // more hide no more latency, and are longer code
  static constexpr int kPanelTurn = 4;

  [[gnu::always_inline]] static Vec broadcast(float x) { return _mm512_set1_ps(x); }
  [[gnu::always_inline]] static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  [[gnu::always_inline]] static Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }

  template <ElementType kType>
  [[gnu::always_inline]] static Vec load_as_float(const void* p) {
    if constexpr (kType == ElementType::kFloat) {
      return _mm512_loadu_ps(p);
    } else if constexpr (kType == ElementType::kHalf) {
      return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
    } else if constexpr (kType == ElementType::kBFloat16) {
      const __m256i bits = _mm256_loadu_si256(static_cast<const __m256i*>(p));
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    } else if constexpr (kType == ElementType::kInt8) {
      return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_128(p)));
    } else {
      const char* bytes = static_cast<const char*>(p);
      const __m512 low = _mm512_castps256_ps512(load8_as_float<kType>(bytes));
      return _mm512_insertf32x8(low, load8_as_float<kType>(bytes + 8), 1);
    }
  }

  template <ElementType kType>
  [[gnu::always_inline]] static void store_as(void* p, Vec v) {
    char* bytes = static_cast<char*>(p);
    store8_as<kType>(bytes, _mm512_castps512_ps256(v));
    store8_as<kType>(bytes + 8 * element_size(kType), _mm512_extractf32x8_ps(v, 1));
  }

  // The upper eight lanes are added to the lower, then as in AVX2.
  [[gnu::always_inline]] static void sum4(Vec a, Vec b, Vec c, Vec d, float* sums) {
    sum4_of_8(fold(a), fold(b), fold(c), fold(d), sums);
  }
  [[gnu::always_inline]] static __m256 fold(Vec v) {
    return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  }

  template <int kRows>
  static constexpr int keys_per_block() {
    return kRows == 1 ? 8 : 4;
  }
};

}  // namespace

constinit const AttentionKernels kAvx512Kernels = AttentionKernelsFor<Avx512>::table("avx512");

}  // namespace paged_kv::cpu
