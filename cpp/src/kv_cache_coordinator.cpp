// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/kv_cache_coordinator.h"

#include "paged_kv/check.h"
#include "paged_kv/coordinators/hybrid.h"
#include "paged_kv/coordinators/no_prefix_cache.h"
#include "paged_kv/coordinators/unitary.h"
#include "paged_kv/managers/factory.h"
#include "paged_kv/math.h"

#include <algorithm>

namespace paged_kv {
namespace {

void check_block_sizes(const KVCacheConfig& config, const CoordinatorOptions& options) {
  const std::int64_t scheduler_block_size = options.scheduler_block_size;
  PAGED_KV_CHECK(options.hash_block_size > 0, "hash_block_size must be positive, got ",
                 options.hash_block_size);
  PAGED_KV_CHECK(scheduler_block_size > 0 && scheduler_block_size % options.hash_block_size == 0,
                 "scheduler_block_size must be a positive multiple of hash_block_size (",
                 options.hash_block_size, "), got ", scheduler_block_size);
  for (const KVCacheGroupSpec& group : config.kv_cache_groups) {
    PAGED_KV_CHECK(group.kv_cache_spec != nullptr, "a group has no kv_cache_spec");
    const std::int64_t block_size = group.kv_cache_spec->block_size();
    PAGED_KV_CHECK(scheduler_block_size % block_size == 0, "scheduler_block_size (",
                   scheduler_block_size,
                   ") must be a multiple of the block size of every group, "
                   "which one of ",
                   block_size, " does not divide");
    PAGED_KV_CHECK(!options.enable_caching || block_size % options.hash_block_size == 0,
                   "the block size of every group must be a multiple of hash_block_size (",
                   options.hash_block_size, "), got ", block_size);
  }
}

void check_retention_interval(const KVCacheConfig& config, std::int64_t scheduler_block_size) {
  const auto& interval = config.prefix_cache_retention_interval;
  if (!interval) return;
  const bool has_sliding_window =
      std::ranges::any_of(config.kv_cache_groups, [](const KVCacheGroupSpec& group) {
        return group.kv_cache_spec->kind() == KVCacheSpecKind::kSlidingWindow;
      });
  PAGED_KV_CHECK(has_sliding_window || *interval == 0,
                 "prefix_cache_retention_interval has no effect without a group of sliding-window "
                 "layers: it must be 0 or None, got ",
                 *interval);
  PAGED_KV_CHECK(*interval >= 0 && *interval % scheduler_block_size == 0,
                 "prefix_cache_retention_interval must be a multiple of scheduler_block_size (",
                 scheduler_block_size, ") and not negative, got ", *interval);
}

// A chunk of a prompt can be reused only up to the block before its last; see drop_eagle_block.
void check_prefill_lookahead(const CoordinatorOptions& options, bool any_group_uses_eagle) {
  PAGED_KV_CHECK(options.num_prefill_lookahead >= 0,
                 "num_prefill_lookahead must not be negative, got ", options.num_prefill_lookahead);
  PAGED_KV_CHECK(!options.enable_caching || !any_group_uses_eagle ||
                     options.num_prefill_lookahead <= options.scheduler_block_size,
                 "num_prefill_lookahead must be at most scheduler_block_size (",
                 options.scheduler_block_size, ") with prefix caching, got ",
                 options.num_prefill_lookahead);
}

std::vector<bool> find_eagle_groups(const KVCacheConfig& config, bool use_eagle) {
  std::vector<bool> is_eagle_group;
  for (const KVCacheGroupSpec& group : config.kv_cache_groups) {
    is_eagle_group.push_back(group.is_eagle_group);
  }
  const bool is_any_marked = std::ranges::find(is_eagle_group, true) != is_eagle_group.end();
  if (use_eagle && !is_any_marked) is_eagle_group.assign(is_eagle_group.size(), true);
  return is_eagle_group;
}

const KVCacheConfig& checked(const KVCacheConfig& config, const CoordinatorOptions& options) {
  check_block_sizes(config, options);
  check_retention_interval(config, options.scheduler_block_size);
  PAGED_KV_CHECK(options.limits.max_model_len > 0, "max_model_len must be positive, got ",
                 options.limits.max_model_len);
  PAGED_KV_CHECK(options.limits.max_in_flight_tokens >= 0,
                 "max_in_flight_tokens must not be negative, got ",
                 options.limits.max_in_flight_tokens);
  return config;
}

}  // namespace

KVCacheCoordinator::KVCacheCoordinator(const KVCacheConfig& kv_cache_config,
                                       const CoordinatorOptions& options)
    : kv_cache_config_(checked(kv_cache_config, options)),
      scheduler_block_size_(options.scheduler_block_size),
      num_reprefillable_tokens_(std::max(options.num_prefill_lookahead - 1, std::int64_t{0})),
      enable_caching_(options.enable_caching),
      block_pool_(
          narrow<std::int32_t>(kv_cache_config.num_blocks, "num_blocks"), options.enable_caching,
          narrow<std::int32_t>(options.hash_block_size, "hash_block_size"),
          options.enable_kv_cache_events, options.metrics_collector, options.eviction_policy,
          narrow<std::int32_t>(options.num_remembered_evictions, "num_remembered_evictions"),
          options.prefix_contents),
      is_eagle_group_(find_eagle_groups(kv_cache_config, options.use_eagle)) {
  const bool any_group_uses_eagle =
      std::ranges::find(is_eagle_group_, true) != is_eagle_group_.end();
  check_prefill_lookahead(options, any_group_uses_eagle);
  const PrefixCachePolicy policy{
      .scheduler_block_size = scheduler_block_size_,
      .retention_interval = kv_cache_config.prefix_cache_retention_interval,
      .any_group_uses_eagle = any_group_uses_eagle};
  for (const KVCacheGroupSpec& group : kv_cache_config_.kv_cache_groups) {
    managers_.push_back(get_manager_for_kv_cache_spec(
        group.kv_cache_spec, block_pool_, GroupId(static_cast<std::int32_t>(managers_.size())),
        options.limits));
    managers_.back()->set_policy(policy);
  }
}

void KVCacheCoordinator::set_uses_eagle(std::size_t group, bool use_eagle) noexcept {
  managers_[group]->set_uses_eagle(use_eagle);
}

bool KVCacheCoordinator::tracks_cached_blocks(RequestIdx request_idx) const noexcept {
  return std::ranges::any_of(managers_, [request_idx](const auto& manager) {
    return manager->tracks_cached_blocks(request_idx);
  });
}

bool KVCacheCoordinator::holds_blocks(RequestIdx request_idx) const noexcept {
  return std::ranges::any_of(managers_, [request_idx](const auto& manager) {
    return !manager->blocks(request_idx).empty();
  });
}

std::int64_t KVCacheCoordinator::get_num_blocks_to_allocate(
    SlotDemand demand, const KVCacheBlocks* new_computed_blocks) const {
  std::int64_t num_blocks = 0;
  for (std::size_t group = 0; group < managers_.size(); ++group) {
    if (new_computed_blocks != nullptr) {
      demand.new_computed_blocks = new_computed_blocks->block_ids[group];
    }
    num_blocks += managers_[group]->get_num_blocks_to_allocate(demand);
  }
  return num_blocks;
}

void KVCacheCoordinator::reserve(SlotDemand demand, const KVCacheBlocks* new_computed_blocks) {
  for (std::size_t group = 0; group < managers_.size(); ++group) {
    if (new_computed_blocks != nullptr) {
      demand.new_computed_blocks = new_computed_blocks->block_ids[group];
    }
    managers_[group]->reserve(demand);
  }
}

void KVCacheCoordinator::allocate_new_computed_blocks(RequestIdx request_idx,
                                                      const KVCacheBlocks* new_computed_blocks,
                                                      std::int64_t num_local_computed_tokens,
                                                      std::int64_t num_external_computed_tokens) {
  const std::int64_t num_tokens = num_local_computed_tokens + num_external_computed_tokens;
  for (std::size_t group = 0; group < managers_.size(); ++group) {
    std::span<const BlockId> blocks;
    if (new_computed_blocks != nullptr) blocks = new_computed_blocks->block_ids[group];
    managers_[group]->add_local_computed_blocks(request_idx, blocks, num_tokens);
  }
  if (num_external_computed_tokens == 0) return;
  for (const auto& manager : managers_) {
    manager->allocate_external_computed_blocks(request_idx, num_tokens,
                                               num_external_computed_tokens);
  }
}

void KVCacheCoordinator::allocate_new_blocks(RequestIdx request_idx, std::int64_t num_tokens,
                                             std::span<std::int64_t> num_new_blocks) {
  for (std::size_t group = 0; group < managers_.size(); ++group) {
    num_new_blocks[group] = managers_[group]->allocate_new_blocks(request_idx, num_tokens);
  }
}

void KVCacheCoordinator::cache_blocks(const Request& request, RequestIdx request_idx,
                                      std::int64_t num_computed_tokens) {
  if (!enable_caching_) return;
  for (std::size_t group = 0; group < managers_.size(); ++group) {
    managers_[group]->cache_blocks(request, request_idx,
                                   get_num_cacheable_tokens(num_computed_tokens, group));
  }
}

std::int64_t KVCacheCoordinator::num_finalized_tokens(
    std::int64_t num_computed_tokens) const noexcept {
  return std::max(num_computed_tokens - num_reprefillable_tokens_, std::int64_t{0});
}

std::int64_t KVCacheCoordinator::get_num_cacheable_tokens(std::int64_t num_computed_tokens,
                                                          std::size_t /*group*/) const {
  return num_finalized_tokens(num_computed_tokens);
}

void KVCacheCoordinator::remove_skipped_blocks(RequestIdx request_idx,
                                               std::int64_t num_computed_tokens) {
  for (const auto& manager : managers_) {
    manager->remove_skipped_blocks(request_idx, num_computed_tokens);
  }
}

void KVCacheCoordinator::free(RequestIdx request_idx) {
  for (const auto& manager : managers_) manager->free(request_idx);
}

void KVCacheCoordinator::pop_blocks_for_free(RequestIdx request_idx, std::vector<BlockId>& blocks) {
  std::size_t num_blocks = 0;
  for (const auto& manager : managers_) num_blocks += manager->blocks(request_idx).size();
  blocks.reserve(num_blocks);  // nothing may fail once a group has forgotten the request
  for (const auto& manager : managers_) manager->pop_blocks_for_free(request_idx, blocks);
}

void KVCacheCoordinator::check_integrity() const {
  block_pool_.check_integrity();
  for (const auto& manager : managers_) manager->check_integrity();
}

std::unique_ptr<KVCacheCoordinator> get_kv_cache_coordinator(const KVCacheConfig& kv_cache_config,
                                                             const CoordinatorOptions& options) {
  if (!options.enable_caching) {
    return std::make_unique<KVCacheCoordinatorNoPrefixCache>(kv_cache_config, options);
  }
  if (kv_cache_config.kv_cache_groups.size() == 1) {
    return std::make_unique<UnitaryKVCacheCoordinator>(kv_cache_config, options);
  }
  return std::make_unique<HybridKVCacheCoordinator>(kv_cache_config, options);
}

}  // namespace paged_kv
