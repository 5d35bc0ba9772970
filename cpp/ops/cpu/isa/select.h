// SPDX-License-Identifier: Apache-2.0
//
// Which instruction set the attention kernels use on this machine.
#pragma once

#include "ops/cpu/isa/attention_kernels.h"

#include <string_view>
#include <vector>

namespace paged_kv::cpu {

// The sets that this CPU can run, slowest first.
[[nodiscard]] std::vector<const AttentionKernels*> available_attention_kernels();

// The set called `name`, or the one to use if the name is empty: the fastest that this library's
// tests have run on. avx512 has never met such a CPU there and must be asked for.
// Throws std::invalid_argument for a name that is unknown, or not available on this CPU.
[[nodiscard]] const AttentionKernels& select_attention_kernels(std::string_view name);

// select_attention_kernels($PAGED_KV_ISA), read at the first call that does not throw.
[[nodiscard]] const AttentionKernels& attention_kernels();

}  // namespace paged_kv::cpu
