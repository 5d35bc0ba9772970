// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "paged_kv/kv_cache_coordinator.h"

#include <vector>

namespace paged_kv {

// Several groups, which must agree on the length of a hit.
//
// Groups with equal specs are looked up at once, those with full attention first: their hit is a
// bound for the others. Every group either accepts a candidate length or gives a shorter one; that
// is repeated until all accept. Lengths only shrink, so it ends.
//
// Source: vLLM 0.32 v1/core/kv_cache_coordinator.py::HybridKVCacheCoordinator.
class HybridKVCacheCoordinator final : public KVCacheCoordinator {
 public:
  HybridKVCacheCoordinator(const KVCacheConfig& kv_cache_config, const CoordinatorOptions& options);

  [[nodiscard]] CacheHit find_longest_cache_hit(std::span<const BlockHash> block_hashes,
                                                std::int64_t max_cache_hit_length) const override;

 private:
  // Groups with one spec.
  struct SpecGroup {
    std::vector<GroupId> group_ids;
    bool is_full_attention = false;
    bool use_eagle = false;  // of any of them: blocks are looked up jointly
  };
  class HitSearch;

  [[nodiscard]] std::int64_t get_num_cacheable_tokens(std::int64_t num_computed_tokens,
                                                      std::size_t group) const override;
  [[nodiscard]] std::int64_t align_cacheable(std::int64_t num_tokens) const noexcept {
    return num_tokens / scheduler_block_size() * scheduler_block_size();
  }
  void add_to_spec_groups(std::size_t group);
  void check_chunked_local_groups() const;

  std::vector<SpecGroup> spec_groups_;
  std::int64_t hash_block_size_;
};

}  // namespace paged_kv
