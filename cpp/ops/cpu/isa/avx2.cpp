// SPDX-License-Identifier: Apache-2.0
//
// Compiled with -mavx2 -mfma -mf16c.
#include "ops/cpu/isa/attention_kernels_impl.h"
#include "ops/cpu/isa/avx2_vec8.h"
#include "ops/cpu/isa/instruction_sets.h"

namespace paged_kv::cpu {
namespace {

struct Avx2 : Avx2Blocks {
  static constexpr int64_t kLanes = 8;
  using Vec = __m256;
  using IntVec = int32_t __attribute__((vector_size(32)));
  static constexpr int kPanelSums = 12;
  static constexpr int kPanelTurn = 8;

  [[gnu::always_inline]] static Vec broadcast(float x) { return _mm256_set1_ps(x); }
  [[gnu::always_inline]] static Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
  [[gnu::always_inline]] static Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }

  template <ElementType kType>
  [[gnu::always_inline]] static Vec load_as_float(const void* p) {
    return load8_as_float<kType>(p);
  }
  template <ElementType kType>
  [[gnu::always_inline]] static void store_as(void* p, Vec v) {
    store8_as<kType>(p, v);
  }
  [[gnu::always_inline]] static void sum4(Vec a, Vec b, Vec c, Vec d, float* sums) {
    sum4_of_8(a, b, c, d, sums);
  }

  // At least eight sums hide the latency of the two FMA units; twelve fit into 16 registers.
  template <int kRows>
  static constexpr int keys_per_block() {
    return kRows == 1 ? 8 : kRows == 4 ? 3 : 4;
  }
};

}  // namespace

constinit const AttentionKernels kAvx2Kernels = AttentionKernelsFor<Avx2>::table("avx2");

}  // namespace paged_kv::cpu
