// SPDX-License-Identifier: Apache-2.0
//
// KVCacheBlocks as Python sees it: ids of blocks, and the storage in which they are positions.
#pragma once

#include "block_handle.h"
#include "paged_kv/kv_cache_blocks.h"

#include <memory>
#include <span>
#include <vector>

namespace paged_kv::bindings {

using PoolPtr = std::shared_ptr<BlockPool>;

[[nodiscard]] inline std::vector<BlockHandle> to_handles(const PoolPtr& pool,
                                                         std::span<const BlockId> ids) {
  const auto storage = std::make_shared<BlockStorage>(BlockStorage{pool, {}});
  std::vector<BlockHandle> handles;
  handles.reserve(ids.size());
  for (const BlockId id : ids) handles.push_back({storage, id});
  return handles;
}

struct BlocksOfStorage {
  std::shared_ptr<BlockStorage> storage;  // null if there are no blocks
  KVCacheBlocks blocks;
};

}  // namespace paged_kv::bindings
