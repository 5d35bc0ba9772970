// SPDX-License-Identifier: Apache-2.0
//
// gather_cache on the CPU. Contract: ops/params/gather_cache.h. In addition lengths, starts and the
// block ids that are used are checked first: std::invalid_argument, nothing written.
//
// Cost: O(tokens * row), parallel over tokens.
#pragma once

#include "ops/cpu/thread_runner.h"
#include "ops/params/gather_cache.h"

namespace paged_kv::cpu {

void gather_cache(const GatherCacheParams& params, const ThreadRunner& runner);

}  // namespace paged_kv::cpu
