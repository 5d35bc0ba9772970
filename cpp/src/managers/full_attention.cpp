// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/managers/full_attention.h"

#include "paged_kv/math.h"
#include "paged_kv/stored_event.h"

#include <algorithm>

namespace paged_kv {

std::int64_t FullAttentionManager::find_longest_cache_hit(
    const CacheHitQuery& query, std::span<std::vector<BlockId>> hit_blocks) const {
  const CoarseBlockHashes hashes(query.block_hashes, block_pool().hash_block_size(), block_size());
  const auto groups = query.kv_cache_group_ids;
  for (const GroupId group : groups) hit_blocks[group.index()].clear();
  const std::int64_t max_num_blocks = std::min(query.max_length / block_size(), hashes.size());
  std::vector<BlockId> found(groups.size());
  std::int64_t num_blocks = 0;
  // Hashes are chained: behind a miss there are only misses.
  while (num_blocks < max_num_blocks &&
         block_pool().find_cached_blocks(hashes[num_blocks], groups, found)) {
    for (std::size_t i = 0; i < groups.size(); ++i) {
      hit_blocks[groups[i].index()].push_back(found[i]);
    }
    ++num_blocks;
  }

  std::int64_t hit_length = num_blocks * block_size();
  if (query.drop_eagle_block && hit_length > 0) {
    hit_length -= std::min(query.alignment_tokens, block_size());
  }
  hit_length -= hit_length % query.alignment_tokens;
  const std::int64_t num_hit_blocks = ceil_div(hit_length, block_size());
  for (const GroupId group : groups) {
    hit_blocks[group.index()].resize(static_cast<std::size_t>(num_hit_blocks));
  }
  return hit_length;
}

void FullAttentionManager::cache_blocks(const Request& request, RequestIdx request_idx,
                                        std::int64_t num_tokens) {
  SingleTypeKVCacheManager::cache_blocks(request, request_idx, num_tokens);
  if (block_size() != block_pool().hash_block_size()) {
    cache_end_of_prompt(request, request_idx, num_tokens);
  }
}

// Names the last hash of the prompt that a repeated prompt can match, if it ends inside a block.
void FullAttentionManager::cache_end_of_prompt(const Request& request, RequestIdx request_idx,
                                               std::int64_t num_tokens) {
  const std::int64_t hash_block_size = block_pool().hash_block_size();
  // The last token must be computed, except for a draft model that drops what is behind.
  const std::int64_t last_token = request.num_prompt_tokens() - (use_eagle() ? 0 : 1);
  if (last_token < hash_block_size) return;
  const std::int64_t boundary = last_token - last_token % hash_block_size;
  if (boundary > num_tokens || boundary % block_size() == 0) return;
  const auto held = blocks(request_idx);
  const std::int64_t block_idx = boundary / block_size();
  if (block_idx >= std::ssize(held)) return;
  bool is_new = false;
  try {
    is_new = block_pool().cache_partial_block(request.block_hashes(),
                                              held[static_cast<std::size_t>(block_idx)], boundary,
                                              kv_cache_group_id());
  } catch (const std::bad_alloc&) {
    return;  // the slots are the request's even so; its next call tries again
  }
  if (KVEventQueue* events = block_pool().kv_events(); events != nullptr && is_new) {
    events->push_made([&] {
      return make_partial_block_stored_event(request, hash_block_size, boundary,
                                             kv_cache_group_id());
    });
  }
}

}  // namespace paged_kv
