// SPDX-License-Identifier: Apache-2.0
//
// The cache writers on the CPU. Contract: ops/params/reshape_and_cache.h. In addition, a slot
// >= num_blocks * block_size is a std::invalid_argument, and nothing has been written.
//
// Cost: reads and writes 2 * num_kv_heads * head_size elements per token, in parallel over tokens.
#pragma once

#include "ops/cpu/thread_runner.h"
#include "ops/params/reshape_and_cache.h"
#include "paged_kv/strided_view.h"

#include <cstdint>

namespace paged_kv::cpu {

void reshape_and_cache(const ReshapeAndCacheParams& params, const ThreadRunner& runner);
void reshape_and_cache_flash(const ReshapeAndCacheFlashParams& params, const ThreadRunner& runner);
void reshape_and_cache_panels(const ReshapeAndCachePanelsParams& params,
                              const ThreadRunner& runner);

// Throws std::invalid_argument naming the first slot that is >= num_slots.
void check_slots(VectorView<const std::int64_t> slot_mapping, std::int64_t num_slots);

}  // namespace paged_kv::cpu
