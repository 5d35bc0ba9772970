// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/coordinators/hybrid.h"

#include "paged_kv/check.h"
#include "paged_kv/math.h"

#include <algorithm>

namespace paged_kv {

HybridKVCacheCoordinator::HybridKVCacheCoordinator(const KVCacheConfig& kv_cache_config,
                                                   const CoordinatorOptions& options)
    : KVCacheCoordinator(kv_cache_config, options), hash_block_size_(options.hash_block_size) {
  PAGED_KV_CHECK(num_groups() > 0, "prefix caching needs at least one cache group");
  for (std::size_t group = 0; group < num_groups(); ++group) add_to_spec_groups(group);
  std::ranges::stable_sort(spec_groups_, std::ranges::greater(), &SpecGroup::is_full_attention);
  for (const SpecGroup& group : spec_groups_) {
    for (const GroupId id : group.group_ids) set_uses_eagle(id.index(), group.use_eagle);
  }
  check_chunked_local_groups();
}

void HybridKVCacheCoordinator::add_to_spec_groups(std::size_t group) {
  const KVCacheSpec& spec = manager(group).kv_cache_spec();
  auto same = std::ranges::find_if(spec_groups_, [&](const SpecGroup& other) {
    return manager(other.group_ids.front().index()).kv_cache_spec().equals(spec);
  });
  if (same == spec_groups_.end()) {
    spec_groups_.push_back(
        {.group_ids = {}, .is_full_attention = spec.kind() == KVCacheSpecKind::kFullAttention});
    same = std::prev(spec_groups_.end());
  }
  same->group_ids.emplace_back(static_cast<std::int32_t>(group));
  same->use_eagle = same->use_eagle || is_eagle_group(group);
}

// Their hits end wherever a cached block ends, and cannot drop one.
void HybridKVCacheCoordinator::check_chunked_local_groups() const {
  for (std::size_t group = 0; group < num_groups(); ++group) {
    const auto& chunked = manager(group);
    if (chunked.kv_cache_spec().kind() != KVCacheSpecKind::kChunkedLocalAttention) continue;
    PAGED_KV_CHECK(!chunked.use_eagle(), "chunked local attention cannot be used with EAGLE");
    PAGED_KV_CHECK(chunked.block_size() == scheduler_block_size(),
                   "with chunked local attention, all groups must have one block size: "
                   "scheduler_block_size is ",
                   scheduler_block_size(), ", that of a group is ", chunked.block_size());
  }
}

std::int64_t HybridKVCacheCoordinator::get_num_cacheable_tokens(std::int64_t num_computed_tokens,
                                                                std::size_t group) const {
  const std::int64_t num_aligned = align_cacheable(num_computed_tokens);
  if (!manager(group).use_eagle() || num_aligned == 0) return num_aligned;
  // A hit needs the block behind its end, which it then drops.
  const std::int64_t num_finalized = num_finalized_tokens(num_computed_tokens);
  return std::min(num_finalized, align_cacheable(num_finalized) + manager(group).block_size());
}

// One search: the candidate length, and what each group found at it.
class HybridKVCacheCoordinator::HitSearch {
 public:
  HitSearch(const HybridKVCacheCoordinator& coordinator, std::span<const BlockHash> block_hashes)
      : coordinator_(coordinator),
        block_hashes_(block_hashes),
        hits_(coordinator.spec_groups_.size()) {
    blocks_.block_ids.resize(coordinator.num_groups());
  }

  CacheHit run(std::int64_t max_cache_hit_length) {
    const auto& groups = coordinator_.spec_groups_;
    // Full attention has every shorter prefix too, so that the other group has the last word.
    const bool is_settled_in_one_round = groups.size() == 2 && groups[0].is_full_attention;
    std::int64_t hit_length = max_cache_hit_length;
    for (;;) {
      std::int64_t candidate = hit_length;
      for (std::size_t i = 0; i < groups.size(); ++i) candidate = shrink(i, candidate);
      if (candidate >= hit_length) break;
      hit_length = candidate;
      if (is_settled_in_one_round) break;
    }
    hit_length = std::max(hit_length, std::int64_t{0});
    trim_full_attention(hit_length);
    return {std::move(blocks_), hit_length, std::max(longest_ - hit_length, std::int64_t{0})};
  }

 private:
  struct SpecGroupHit {
    bool is_looked_up = false;
    std::int64_t length = 0;
    bool is_eagle_block_dropped = false;  // at the present candidate
  };

  // What remains of the candidate in one spec group.
  std::int64_t shrink(std::size_t spec_group, std::int64_t candidate) {
    const SpecGroup& group = coordinator_.spec_groups_[spec_group];
    SpecGroupHit& hit = hits_[spec_group];
    // One lookup is enough for full attention: its hit has every shorter one in it.
    if (group.is_full_attention && hit.is_looked_up) return std::min(candidate, hit.length);

    const auto& manager = coordinator_.manager(group.group_ids.front().index());
    const bool drops = group.use_eagle && !hit.is_eagle_block_dropped;
    std::int64_t max_length = candidate;
    if (drops) {
      // One block more, so that what is left after the drop is the candidate.
      max_length = std::min(candidate + manager.block_size(),
                            std::ssize(block_hashes_) * coordinator_.hash_block_size_);
    }
    const std::int64_t length =
        manager.find_longest_cache_hit({.block_hashes = block_hashes_,
                                        .max_length = max_length,
                                        .kv_cache_group_ids = group.group_ids,
                                        .drop_eagle_block = drops,
                                        .alignment_tokens = coordinator_.scheduler_block_size()},
                                       blocks_.block_ids);
    if (drops) {
      hit.is_eagle_block_dropped = true;
    } else if (length < candidate) {
      // Drops were right for a longer candidate only.
      for (SpecGroupHit& other : hits_) other.is_eagle_block_dropped = false;
    }
    hit.is_looked_up = true;
    hit.length = length;
    longest_ = std::max(longest_, length);
    return length;
  }

  void trim_full_attention(std::int64_t hit_length) {
    for (const SpecGroup& group : coordinator_.spec_groups_) {
      if (!group.is_full_attention) continue;
      for (const GroupId id : group.group_ids) {
        auto& blocks = blocks_.block_ids[id.index()];
        const std::int64_t num_blocks =
            ceil_div(hit_length, coordinator_.manager(id.index()).block_size());
        if (std::ssize(blocks) > num_blocks) blocks.resize(static_cast<std::size_t>(num_blocks));
      }
    }
  }

  const HybridKVCacheCoordinator& coordinator_;
  std::span<const BlockHash> block_hashes_;
  std::vector<SpecGroupHit> hits_;
  KVCacheBlocks blocks_;
  std::int64_t longest_ = 0;
};

CacheHit HybridKVCacheCoordinator::find_longest_cache_hit(std::span<const BlockHash> block_hashes,
                                                          std::int64_t max_cache_hit_length) const {
  return HitSearch(*this, block_hashes).run(max_cache_hit_length);
}

}  // namespace paged_kv
