// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "paged_kv/kv_cache_coordinator.h"

namespace paged_kv {

// One group: its manager alone decides on hits. Blocks are as large as what a hash covers.
//
// Source: vLLM 0.32 v1/core/kv_cache_coordinator.py::UnitaryKVCacheCoordinator.
class UnitaryKVCacheCoordinator final : public KVCacheCoordinator {
 public:
  UnitaryKVCacheCoordinator(const KVCacheConfig& kv_cache_config,
                            const CoordinatorOptions& options);

  [[nodiscard]] CacheHit find_longest_cache_hit(std::span<const BlockHash> block_hashes,
                                                std::int64_t max_cache_hit_length) const override;
};

}  // namespace paged_kv
