// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/kv_cache_blocks.h"

#include "paged_kv/check.h"

namespace paged_kv {

KVCacheBlocks operator+(const KVCacheBlocks& a, const KVCacheBlocks& b) {
  PAGED_KV_CHECK(a.block_ids.size() == b.block_ids.size(), "cannot add blocks of ",
                 b.block_ids.size(), " groups to blocks of ", a.block_ids.size(), " groups");
  KVCacheBlocks sum = a;
  for (std::size_t group = 0; group < sum.block_ids.size(); ++group) {
    sum.block_ids[group].insert(sum.block_ids[group].end(), b.block_ids[group].begin(),
                                b.block_ids[group].end());
  }
  return sum;
}

std::vector<BlockId> get_unhashed_block_ids(const KVCacheBlocks& kv_cache_blocks,
                                            std::span<const KVCacheBlock> blocks) {
  PAGED_KV_CHECK(kv_cache_blocks.block_ids.size() == 1, "expected one group, got ",
                 kv_cache_blocks.block_ids.size());
  std::vector<BlockId> unhashed;
  for (const BlockId id : kv_cache_blocks.block_ids.front()) {
    if (!blocks[id.index()].is_hashed()) unhashed.push_back(id);
  }
  return unhashed;
}

}  // namespace paged_kv
