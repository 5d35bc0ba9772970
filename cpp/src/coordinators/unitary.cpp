// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/coordinators/unitary.h"

#include "paged_kv/check.h"

namespace paged_kv {

UnitaryKVCacheCoordinator::UnitaryKVCacheCoordinator(const KVCacheConfig& kv_cache_config,
                                                     const CoordinatorOptions& options)
    : KVCacheCoordinator(kv_cache_config, options) {
  const KVCacheSpec& spec = manager(0).kv_cache_spec();
  PAGED_KV_CHECK(spec.block_size() == options.hash_block_size,
                 "with one group, hash_block_size must be its block size (", spec.block_size(),
                 "), got ", options.hash_block_size);
  PAGED_KV_CHECK(!is_eagle_group(0) || spec.kind() != KVCacheSpecKind::kChunkedLocalAttention,
                 "chunked local attention cannot be used with EAGLE");
  set_uses_eagle(0, is_eagle_group(0));
}

CacheHit UnitaryKVCacheCoordinator::find_longest_cache_hit(
    std::span<const BlockHash> block_hashes, std::int64_t max_cache_hit_length) const {
  static constexpr GroupId kOnlyGroup{0};
  CacheHit hit;
  hit.blocks.block_ids.resize(1);
  hit.num_tokens = manager(0).find_longest_cache_hit({.block_hashes = block_hashes,
                                                      .max_length = max_cache_hit_length,
                                                      .kv_cache_group_ids = {&kOnlyGroup, 1},
                                                      .drop_eagle_block = is_eagle_group(0),
                                                      .alignment_tokens = manager(0).block_size()},
                                                     hit.blocks.block_ids);
  return hit;
}

}  // namespace paged_kv
