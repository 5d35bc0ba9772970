// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/coordinators/no_prefix_cache.h"

namespace paged_kv {

CacheHit KVCacheCoordinatorNoPrefixCache::find_longest_cache_hit(
    std::span<const BlockHash> /*block_hashes*/, std::int64_t /*max_cache_hit_length*/) const {
  CacheHit hit;
  hit.blocks.block_ids.resize(num_groups());
  return hit;
}

}  // namespace paged_kv
