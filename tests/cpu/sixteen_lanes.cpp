// SPDX-License-Identifier: Apache-2.0
#include "sixteen_lanes.h"

#include "ops/cpu/isa/attention_kernels_impl.h"
#include "ops/cpu/isa/gcc_vectors.h"

namespace paged_kv::cpu {
namespace {

struct SixteenLanes : GccVectors<16> {
  template <ElementType kType>
  static constexpr bool kTakesInProducts =
      kType == ElementType::kFloat || kType == ElementType::kBFloat16;

  static constexpr int kPanelSums = 12;  // as with AVX-512, and keys_per_block()
  template <int kRows>
  static constexpr int keys_per_block() {
    return kRows == 1 ? 8 : 4;
  }
};

}  // namespace

constinit const AttentionKernels testing::kSixteenLanes =
    AttentionKernelsFor<SixteenLanes>::table("sixteen_lanes");

}  // namespace paged_kv::cpu
