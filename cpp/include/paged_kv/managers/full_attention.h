// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "paged_kv/managers/single_type.h"

namespace paged_kv {

// Every block is needed until the request ends, and every full block can serve a hit.
//
// A hit is the longest run of cached blocks from the left. Where hashes are finer than blocks, the
// block in which the prompt ends is findable by its part of the prompt too.
//
// Source: vLLM 0.32 v1/core/single_type_kv_cache_manager.py::FullAttentionManager.
class FullAttentionManager final : public SingleTypeKVCacheManager {
 public:
  using SingleTypeKVCacheManager::SingleTypeKVCacheManager;

  void cache_blocks(const Request& request, RequestIdx request_idx,
                    std::int64_t num_tokens) override;
  std::int64_t find_longest_cache_hit(const CacheHitQuery& query,
                                      std::span<std::vector<BlockId>> hit_blocks) const override;
  [[nodiscard]] std::int64_t get_num_skipped_tokens(
      std::int64_t /*num_computed_tokens*/) const override {
    return 0;
  }

 private:
  void cache_end_of_prompt(const Request& request, RequestIdx request_idx, std::int64_t num_tokens);
};

}  // namespace paged_kv
