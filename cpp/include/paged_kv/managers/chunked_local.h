// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "paged_kv/managers/single_type.h"

namespace paged_kv {

// A query sees the tokens of its own chunk; earlier chunks are given back.
//
// The next token does not need the chunks before its own, so they count as a hit without a lookup:
// null blocks. Within its chunk a hit is the longest run of cached blocks from the left.
//
// Source: vLLM 0.32 v1/core/single_type_kv_cache_manager.py::ChunkedLocalAttentionManager.
class ChunkedLocalAttentionManager final : public SingleTypeKVCacheManager {
 public:
  ChunkedLocalAttentionManager(const std::shared_ptr<const ChunkedLocalAttentionSpec>& spec,
                               BlockPool& block_pool, GroupId kv_cache_group_id,
                               const RequestLimits& limits)
      : SingleTypeKVCacheManager(spec, block_pool, kv_cache_group_id, limits),
        attention_chunk_size_(spec->attention_chunk_size()) {}

  std::int64_t find_longest_cache_hit(const CacheHitQuery& query,
                                      std::span<std::vector<BlockId>> hit_blocks) const override;
  [[nodiscard]] std::int64_t get_num_skipped_tokens(
      std::int64_t num_computed_tokens) const override {
    return num_computed_tokens - num_computed_tokens % attention_chunk_size_;
  }

 private:
  std::int64_t attention_chunk_size_;
};

}  // namespace paged_kv
