// SPDX-License-Identifier: Apache-2.0
//
// The code that all instruction sets share, with as many lanes as AVX-512 has, for any CPU.
#pragma once

#include "ops/cpu/isa/attention_kernels.h"
#include "ops/cpu/isa/select.h"

#include <vector>

namespace paged_kv::cpu::testing {

// Products take float32 and bfloat16.
extern const AttentionKernels kSixteenLanes;

// Those that this CPU can run, and kSixteenLanes.
[[nodiscard]] inline std::vector<const AttentionKernels*> attention_kernels_to_test() {
  std::vector<const AttentionKernels*> result{&kSixteenLanes};
  for (const InstructionSet& set : available_instruction_sets()) result.push_back(set.attention);
  return result;
}

}  // namespace paged_kv::cpu::testing
