// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "paged_kv/block_pool.h"
#include "paged_kv/kv_cache_blocks.h"
#include "paged_kv/kv_cache_config.h"
#include "paged_kv/managers/single_type.h"
#include "paged_kv/request.h"

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace paged_kv {

struct CoordinatorOptions {
  RequestLimits limits;
  std::int64_t scheduler_block_size = 0;  // a multiple of every group's block size, in tokens
  std::int64_t hash_block_size = 0;       // a divisor of every group's block size, in tokens
  bool enable_caching = true;
  // Prefix hits drop their last block in the groups marked as EAGLE's, or in all if none is.
  bool use_eagle = false;
  // Tokens after a chunk of a prompt that the draft model looks at.
  std::int64_t num_prefill_lookahead = 0;
  bool enable_kv_cache_events = false;
  std::shared_ptr<KVCacheMetricsCollector> metrics_collector;
  std::shared_ptr<EvictionPolicy> eviction_policy = nullptr;
  std::int64_t num_remembered_evictions = 0;
  std::shared_ptr<PrefixContents> prefix_contents = nullptr;
};

struct CacheHit {
  KVCacheBlocks blocks;
  std::int64_t num_tokens = 0;
  // By how much another group's hit is longer: a prefix that requests share, but that a group which
  // keeps few blocks has not kept.
  std::int64_t num_uncached_common_prefix_tokens = 0;
};

// The blocks of requests in all cache groups, which share one pool: one manager a group.
//
// Subclasses find prefix hits: not at all, in one group, or in several that must agree.
//
// Cost: that of the managers, summed over the groups.
// Thread rule: one owner thread.
// Source: vLLM 0.32 v1/core/kv_cache_coordinator.py::KVCacheCoordinator.
class KVCacheCoordinator {
 public:
  // Throws std::invalid_argument if the block sizes or the retention interval do not fit together.
  KVCacheCoordinator(const KVCacheConfig& kv_cache_config, const CoordinatorOptions& options);
  virtual ~KVCacheCoordinator() = default;
  KVCacheCoordinator(const KVCacheCoordinator&) = delete;
  KVCacheCoordinator& operator=(const KVCacheCoordinator&) = delete;

  [[nodiscard]] BlockPool& block_pool() noexcept { return block_pool_; }
  [[nodiscard]] const BlockPool& block_pool() const noexcept { return block_pool_; }
  [[nodiscard]] std::size_t num_groups() const noexcept { return managers_.size(); }
  // Every hit is a multiple, in tokens.
  [[nodiscard]] std::int64_t scheduler_block_size() const noexcept { return scheduler_block_size_; }
  [[nodiscard]] const SingleTypeKVCacheManager& manager(std::size_t group) const noexcept {
    return *managers_[group];
  }

  // Whether it is known of some group which blocks of the request are cached.
  [[nodiscard]] bool tracks_cached_blocks(RequestIdx request_idx) const noexcept;
  [[nodiscard]] bool holds_blocks(RequestIdx request_idx) const noexcept;

  // Free blocks that the demand takes in all groups; new_computed_blocks has one list a group, or
  // is null. `demand` has none of its own.
  [[nodiscard]] std::int64_t get_num_blocks_to_allocate(
      SlotDemand demand, const KVCacheBlocks* new_computed_blocks) const;

  // Takes the memory for what the demand would write down, so that the next two need none.
  void reserve(SlotDemand demand, const KVCacheBlocks* new_computed_blocks);
  // Takes over the hit in all groups, then takes blocks for tokens from outside in all groups.
  void allocate_new_computed_blocks(RequestIdx request_idx,
                                    const KVCacheBlocks* new_computed_blocks,
                                    std::int64_t num_local_computed_tokens,
                                    std::int64_t num_external_computed_tokens);
  // num_new_blocks[g] becomes how many blocks group g took.
  void allocate_new_blocks(RequestIdx request_idx, std::int64_t num_tokens,
                           std::span<std::int64_t> num_new_blocks);
  // How many blocks fork() takes for the first `num_tokens` tokens of a request.
  [[nodiscard]] std::int64_t num_blocks_to_copy(RequestIdx parent_idx,
                                                std::int64_t num_tokens) const noexcept;
  // Gives a request without blocks those of the first `num_tokens` tokens of its parent: shares
  // them, or copies to new blocks what is written again. Appends the copies, which have room.
  void fork(RequestIdx parent_idx, RequestIdx child_idx, std::int64_t num_tokens,
            std::vector<GroupBlockCopy>& copies);
  // Nothing happens without caching.
  void cache_blocks(const Request& request, RequestIdx request_idx,
                    std::int64_t num_computed_tokens);
  void remove_skipped_blocks(RequestIdx request_idx, std::int64_t num_computed_tokens);
  void free(RequestIdx request_idx);
  // Appends the blocks, group after group.
  void pop_blocks_for_free(RequestIdx request_idx, std::vector<BlockId>& blocks);

  // The longest prefix that every group has, at most `max_cache_hit_length` tokens.
  [[nodiscard]] virtual CacheHit find_longest_cache_hit(
      std::span<const BlockHash> block_hashes, std::int64_t max_cache_hit_length) const = 0;

  // Throws InvariantError if an invariant of the pool or of a manager does not hold.
  void check_integrity() const;

 protected:
  // Of `num_computed_tokens`, those whose blocks may be cached in a group.
  [[nodiscard]] virtual std::int64_t get_num_cacheable_tokens(std::int64_t num_computed_tokens,
                                                              std::size_t group) const;

  [[nodiscard]] const KVCacheConfig& kv_cache_config() const noexcept { return kv_cache_config_; }
  [[nodiscard]] bool is_eagle_group(std::size_t group) const noexcept {
    return is_eagle_group_[group];
  }
  // Lets a group's cached blocks be those that its hits need.
  void set_uses_eagle(std::size_t group, bool use_eagle) noexcept;
  // Without the last tokens of a chunk, which a draft model with several steps computes again.
  [[nodiscard]] std::int64_t num_finalized_tokens(std::int64_t num_computed_tokens) const noexcept;

 private:
  [[nodiscard]] ForkedTokens forked_tokens(std::int64_t num_tokens) const noexcept {
    return {.num_tokens = num_tokens, .num_final_tokens = num_finalized_tokens(num_tokens)};
  }

  KVCacheConfig kv_cache_config_;
  std::int64_t scheduler_block_size_;
  std::int64_t num_reprefillable_tokens_;
  bool enable_caching_;
  BlockPool block_pool_;
  std::vector<bool> is_eagle_group_;
  std::vector<std::unique_ptr<SingleTypeKVCacheManager>> managers_;
};

// The coordinator for the number of groups, and for caching on or off.
[[nodiscard]] std::unique_ptr<KVCacheCoordinator> get_kv_cache_coordinator(
    const KVCacheConfig& kv_cache_config, const CoordinatorOptions& options);

}  // namespace paged_kv
