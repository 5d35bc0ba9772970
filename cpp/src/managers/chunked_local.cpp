// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/managers/chunked_local.h"

#include <algorithm>

namespace paged_kv {

std::int64_t ChunkedLocalAttentionManager::find_longest_cache_hit(
    const CacheHitQuery& query, std::span<std::vector<BlockId>> hit_blocks) const {
  const CoarseBlockHashes hashes(query.block_hashes, block_pool().hash_block_size(), block_size());
  const auto groups = query.kv_cache_group_ids;
  const std::int64_t max_length = std::max(query.max_length, std::int64_t{0});
  const std::int64_t num_skipped_blocks = get_num_skipped_tokens(max_length) / block_size();
  for (const GroupId group : groups) {
    hit_blocks[group.index()].assign(static_cast<std::size_t>(num_skipped_blocks), kNullBlockId);
  }
  const std::int64_t max_num_blocks = std::min(max_length / block_size(), hashes.size());
  std::vector<BlockId> found(groups.size());
  std::int64_t num_blocks = num_skipped_blocks;
  while (num_blocks < max_num_blocks &&
         block_pool().find_cached_blocks(hashes[num_blocks], groups, found)) {
    for (std::size_t i = 0; i < groups.size(); ++i) {
      hit_blocks[groups[i].index()].push_back(found[i]);
    }
    ++num_blocks;
  }
  return num_blocks * block_size();
}

}  // namespace paged_kv
