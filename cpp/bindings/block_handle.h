// SPDX-License-Identifier: Apache-2.0
//
// KVCacheBlock as Python sees it: a place in a vector of blocks that the handle keeps alive.
#pragma once

#include "paged_kv/block_pool.h"
#include "paged_kv/check.h"
#include "paged_kv/kv_block.h"

#include <memory>
#include <span>
#include <vector>

namespace paged_kv::bindings {

// The vector: a pool's, or one for blocks that were made without a pool.
struct BlockStorage {
  std::shared_ptr<const BlockPool> pool;
  std::vector<KVCacheBlock> own;

  [[nodiscard]] std::span<const KVCacheBlock> blocks() const {
    return pool ? pool->blocks() : std::span<const KVCacheBlock>(own);
  }
};

struct BlockHandle {
  std::shared_ptr<BlockStorage> storage;
  BlockId position;
  // Made by KVCacheBlock(id) and not yet moved to the storage of a queue.
  bool is_alone = false;

  [[nodiscard]] static BlockHandle make_alone(BlockId block_id) {
    PAGED_KV_CHECK(block_id.valid(), "block_id must not be negative, got ", block_id);
    auto storage = std::make_shared<BlockStorage>();
    storage->own.resize(1);
    storage->own[0].block_id = block_id;
    return {std::move(storage), BlockId(0), true};
  }

  [[nodiscard]] const KVCacheBlock& block() const { return storage->blocks()[position.index()]; }

  // For changes. A pool's blocks change through the pool alone.
  [[nodiscard]] KVCacheBlock& own_block() const {
    PAGED_KV_CHECK(!storage->pool, "block ", block().block_id,
                   " belongs to a BlockPool: change it through the pool");
    return storage->own[position.index()];
  }

  friend bool operator==(const BlockHandle& a, const BlockHandle& b) {
    return &a.block() == &b.block();
  }
};

// Moves blocks that stand alone into one storage, in order, and points their handles to it.
// Throws std::invalid_argument, with nothing moved, if one is in a storage already.
[[nodiscard]] inline std::shared_ptr<BlockStorage> move_to_one_storage(
    std::span<BlockHandle* const> handles) {
  auto storage = std::make_shared<BlockStorage>();
  storage->own.reserve(handles.size());
  for (std::size_t i = 0; i < handles.size(); ++i) {
    BlockHandle& handle = *handles[i];
    if (!handle.is_alone) {
      for (BlockHandle* marked : handles.first(i)) marked->is_alone = true;
      PAGED_KV_CHECK(false, "block ", handle.block().block_id,
                     " belongs to a pool or queue already, or is given twice");
    }
    handle.is_alone = false;  // marks it, so that it is not moved twice
    storage->own.push_back(handle.block());
  }
  for (std::size_t i = 0; i < handles.size(); ++i) {
    handles[i]->storage = storage;
    handles[i]->position = BlockId(static_cast<std::int32_t>(i));
  }
  return storage;
}

}  // namespace paged_kv::bindings
