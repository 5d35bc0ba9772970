// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "paged_kv/kv_cache_coordinator.h"

namespace paged_kv {

// Without prefix caching: any number of groups, none too, and no hits.
//
// Source: vLLM 0.32 v1/core/kv_cache_coordinator.py::KVCacheCoordinatorNoPrefixCache.
class KVCacheCoordinatorNoPrefixCache final : public KVCacheCoordinator {
 public:
  using KVCacheCoordinator::KVCacheCoordinator;

  [[nodiscard]] CacheHit find_longest_cache_hit(std::span<const BlockHash> block_hashes,
                                                std::int64_t max_cache_hit_length) const override;
};

}  // namespace paged_kv
