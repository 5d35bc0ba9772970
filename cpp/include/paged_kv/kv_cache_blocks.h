// SPDX-License-Identifier: Apache-2.0
//
// The blocks of one request, per cache group: what an allocation returns.
//
// Source: vLLM 0.32 v1/core/kv_cache_manager.py::KVCacheBlocks.
#pragma once

#include "paged_kv/ids.h"
#include "paged_kv/kv_block.h"

#include <span>
#include <vector>

namespace paged_kv {

struct KVCacheBlocks {
  // block_ids[g][i] is block i of group g. Groups may differ in length.
  std::vector<std::vector<BlockId>> block_ids;

  // The same number of groups without blocks.
  [[nodiscard]] KVCacheBlocks new_empty() const { return {decltype(block_ids)(block_ids.size())}; }

  // Group by group, the blocks of `a` and then those of `b`. Throws std::invalid_argument if they
  // have different numbers of groups.
  friend KVCacheBlocks operator+(const KVCacheBlocks& a, const KVCacheBlocks& b);

  friend bool operator==(const KVCacheBlocks&, const KVCacheBlocks&) = default;
};

// Content to copy from block to block, in the layers of one group.
struct GroupBlockCopy {
  GroupId group_id;
  BlockId src;
  BlockId dst;
  friend bool operator==(const GroupBlockCopy&, const GroupBlockCopy&) = default;
};

// Ids of the blocks of the only group that are not in the prefix cache, `blocks` being all blocks
// of the pool. Throws std::invalid_argument unless there is exactly one group.
[[nodiscard]] std::vector<BlockId> get_unhashed_block_ids(const KVCacheBlocks& kv_cache_blocks,
                                                          std::span<const KVCacheBlock> blocks);

}  // namespace paged_kv
