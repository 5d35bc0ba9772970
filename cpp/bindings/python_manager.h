// SPDX-License-Identifier: Apache-2.0
//
// KVCacheManager as Python sees it.
#pragma once

#include "blocks_of_storage.h"
#include "paged_kv/check.h"
#include "paged_kv/kv_cache_manager.h"

#include <algorithm>
#include <memory>
#include <utility>

namespace paged_kv::bindings {

// The manager, with what its results refer to.
class PythonManager {
 public:
  PythonManager(const KVCacheConfig& config, const KVCacheManagerOptions& options,
                bool use_int_block_hashes)
      : manager_(std::make_shared<KVCacheManager>(config, options)),
        storage_(std::make_shared<BlockStorage>(BlockStorage{pool(), {}})),
        use_int_block_hashes_(use_int_block_hashes) {}

  [[nodiscard]] KVCacheManager& manager() const { return *manager_; }
  // Keeps the manager alive.
  [[nodiscard]] PoolPtr pool() const { return {manager_, &manager_->block_pool()}; }
  [[nodiscard]] bool use_int_block_hashes() const { return use_int_block_hashes_; }

  [[nodiscard]] BlocksOfStorage to_python(KVCacheBlocks blocks) const {
    return {storage_, std::move(blocks)};
  }
  [[nodiscard]] const KVCacheBlocks& from_python(const BlocksOfStorage& blocks) const {
    const bool is_empty =
        std::ranges::all_of(blocks.blocks.block_ids, [](const auto& ids) { return ids.empty(); });
    PAGED_KV_CHECK(is_empty || blocks.storage->pool.get() == &manager_->block_pool(),
                   "the blocks belong to another pool");
    return blocks.blocks;
  }
  [[nodiscard]] BlocksOfStorage empty_blocks() const {
    KVCacheBlocks blocks;
    blocks.block_ids.resize(manager_->num_kv_cache_groups());
    return to_python(std::move(blocks));
  }

 private:
  std::shared_ptr<KVCacheManager> manager_;
  std::shared_ptr<BlockStorage> storage_;
  bool use_int_block_hashes_;
};

void bind_fork(py::class_<PythonManager>& manager);

}  // namespace paged_kv::bindings
