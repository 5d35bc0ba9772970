// SPDX-License-Identifier: Apache-2.0
// What KVCacheManager tells of requests, hits and itself.
#include "paged_kv/check.h"
#include "paged_kv/kv_cache_manager.h"
#include "paged_kv/math.h"
#include "paged_kv/token_checks.h"

#include <algorithm>
#include <array>
#include <utility>

namespace paged_kv {

KVCacheBlocks KVCacheManager::get_blocks(std::string_view request_id) const {
  const RequestIdx request_idx = request_table_.find(request_id);
  KVCacheBlocks result;
  for (std::size_t group = 0; group < num_kv_cache_groups(); ++group) {
    const auto held = coordinator_->manager(group).blocks(request_idx);
    result.block_ids.emplace_back(held.begin(), held.end());
  }
  return result;
}

KVCacheBlocks KVCacheManager::get_blocks_for_computed_tokens(
    std::string_view request_id, std::int64_t num_computed_tokens) const {
  check_tokens(num_computed_tokens, "num_computed_tokens");
  KVCacheBlocks result = get_blocks(request_id);
  for (std::size_t group = 0; group < num_kv_cache_groups(); ++group) {
    auto& ids = result.block_ids[group];
    const std::int64_t num_blocks =
        ceil_div(num_computed_tokens, coordinator_->manager(group).block_size());
    if (std::ssize(ids) > num_blocks) ids.resize(static_cast<std::size_t>(num_blocks));
  }
  return result;
}

std::int64_t KVCacheManager::estimate_cached_tokens(const Request& request) const {
  const RequestIdx request_idx = request_table_.find(request);
  const auto all_blocks = coordinator_->block_pool().blocks();
  std::optional<std::int64_t> num_tokens;
  for (std::size_t group = 0; group < num_kv_cache_groups(); ++group) {
    std::int64_t num_group_tokens = 0;
    for (const BlockId id : coordinator_->manager(group).blocks(request_idx)) {
      const KVCacheBlock& block = all_blocks[id.index()];
      num_group_tokens = std::max<std::int64_t>(num_group_tokens, block.block_hash_num_tokens);
    }
    num_tokens = std::min(num_tokens.value_or(num_group_tokens), num_group_tokens);
  }
  return num_tokens.value_or(0);
}

KVCacheBlocks KVCacheManager::truncate_computed_blocks(const KVCacheBlocks& blocks,
                                                       std::int64_t num_computed_tokens) const {
  check_tokens(num_computed_tokens, "num_computed_tokens");
  PAGED_KV_CHECK(blocks.block_ids.size() == num_kv_cache_groups(), "blocks must have ",
                 num_kv_cache_groups(), " groups, got ", blocks.block_ids.size());
  KVCacheBlocks result;
  for (std::size_t group = 0; group < num_kv_cache_groups(); ++group) {
    const std::int64_t block_size = coordinator_->manager(group).block_size();
    const auto& ids = blocks.block_ids[group];
    PAGED_KV_CHECK(num_computed_tokens % block_size == 0 &&
                       num_computed_tokens / block_size <= std::ssize(ids),
                   "num_computed_tokens must be a multiple of ", block_size, " within ", ids.size(),
                   " blocks, got ", num_computed_tokens);
    result.block_ids.emplace_back(ids.begin(), ids.begin() + num_computed_tokens / block_size);
  }
  return result;
}

void KVCacheManager::record_prefix_cache_stats(const Request& request,
                                               std::int64_t num_hits) noexcept {
  if (!prefix_cache_stats_ || !prefix_cache_lookup_enabled(request)) return;
  prefix_cache_stats_->record(request.num_tokens(), num_hits, request.progress.num_preemptions > 0);
}

std::optional<PrefixCacheStats> KVCacheManager::make_prefix_cache_stats() noexcept {
  if (!prefix_cache_stats_) return std::nullopt;
  return std::exchange(prefix_cache_stats_, PrefixCacheStats{});
}

std::vector<KVCacheEvent> KVCacheManager::take_events() {
  KVEventQueue* queue = block_pool().kv_events();
  if (queue == nullptr) return {};
  std::vector<KVCacheEvent> events = queue->take();
  for (KVCacheEvent& event : events) {
    if (auto* stored = std::get_if<BlockStored>(&event)) {
      const KVCacheSpec& spec = coordinator_->manager(stored->group_idx.index()).kv_cache_spec();
      stored->kv_cache_spec_kind = to_string(spec.kind());
      stored->kv_cache_spec_sliding_window = spec.sliding_window_of_group();
    }
  }
  return events;
}

void KVCacheManager::check_integrity() const {
  coordinator_->check_integrity();
  request_table_.check_integrity();
  const auto all_blocks = coordinator_->block_pool().blocks();
  struct Use {
    std::int64_t num_places = 0;
    std::size_t group = 0;
    std::size_t place = 0;
  };
  std::vector<Use> uses(all_blocks.size());
  for (std::size_t group = 0; group < num_kv_cache_groups(); ++group) {
    for (std::size_t row = 0; row < request_table_.num_rows(); ++row) {
      const RequestIdx request_idx(static_cast<std::int32_t>(row));
      const auto held = coordinator_->manager(group).blocks(request_idx);
      for (std::size_t place = 0; place < held.size(); ++place) {
        if (held[place] == kNullBlockId) continue;
        Use& use = uses[held[place].index()];
        PAGED_KV_CHECK_AS(InvariantError,
                          use.num_places == 0 || (use.group == group && use.place == place),
                          "K2: block ", held[place], " is at place ", use.place, " of group ",
                          use.group, " and at place ", place, " of group ", group);
        use = {use.num_places + 1, group, place};
      }
    }
  }
  for (std::size_t i = 0; i < all_blocks.size(); ++i) {
    PAGED_KV_CHECK_AS(InvariantError, uses[i].num_places <= all_blocks[i].ref_cnt, "K1: block ", i,
                      " is in ", uses[i].num_places, " places, but has ", all_blocks[i].ref_cnt,
                      " holders");
  }
}

}  // namespace paged_kv
