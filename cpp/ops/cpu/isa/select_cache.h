// SPDX-License-Identifier: Apache-2.0
//
// Which instruction set the conversions of quantised caches use on this machine.
#pragma once

#include "ops/cpu/isa/cache_kernels.h"

#include <vector>

namespace paged_kv::cpu {

// The tables that this CPU can run, slowest first.
[[nodiscard]] std::vector<const CacheKernels*> available_cache_kernels();

// The table for the instruction set of attention_kernels(), or the next narrower one. Throws as
// that does.
[[nodiscard]] const CacheKernels& cache_kernels();

}  // namespace paged_kv::cpu
