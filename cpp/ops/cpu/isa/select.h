// SPDX-License-Identifier: Apache-2.0
//
// Which instruction set the kernels use on this machine.
#pragma once

#include "ops/cpu/isa/attention_kernels.h"
#include "ops/cpu/isa/cache_kernels.h"

#include <string_view>
#include <vector>

namespace paged_kv::cpu {

struct InstructionSet {
  const AttentionKernels* attention;  // whose name is that of the set
  const CacheKernels* cache;          // of this set or a narrower one
};

// Those that this CPU can run, slowest first.
[[nodiscard]] std::vector<InstructionSet> available_instruction_sets();

// The set called `name`, or the one to use if the name is empty: the fastest that this library's
// tests have run on. avx512 has never met such a CPU there and must be asked for.
// Throws std::invalid_argument for a name that is unknown, or not available on this CPU.
[[nodiscard]] InstructionSet select_instruction_set(std::string_view name);

// Of select_instruction_set($PAGED_KV_ISA), read at the first call that does not throw.
[[nodiscard]] const AttentionKernels& attention_kernels();
[[nodiscard]] const CacheKernels& cache_kernels();

}  // namespace paged_kv::cpu
