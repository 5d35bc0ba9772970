// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/kv_cache_manager.h"

#include "paged_kv/check.h"
#include "paged_kv/math.h"
#include "paged_kv/stored_event.h"
#include "paged_kv/token_checks.h"

#include <algorithm>
#include <array>
#include <utility>

namespace paged_kv {
namespace {

CoordinatorOptions coordinator_options(const KVCacheManagerOptions& options) {
  return {.limits = {.max_model_len = options.max_model_len,
                     .max_in_flight_tokens =
                         options.max_in_flight_tokens.value_or(options.max_model_len)},
          .scheduler_block_size = options.scheduler_block_size,
          .hash_block_size = options.hash_block_size,
          .enable_caching = options.enable_caching,
          .use_eagle = options.use_eagle,
          .num_prefill_lookahead = options.num_prefill_lookahead,
          .enable_kv_cache_events = options.enable_kv_cache_events,
          .metrics_collector = options.metrics_collector,
          .eviction_policy = options.eviction_policy,
          .num_remembered_evictions = options.num_remembered_evictions,
          .prefix_contents = options.prefix_contents};
}

std::int64_t to_watermark_blocks(double watermark, std::int64_t num_blocks) {
  PAGED_KV_CHECK(watermark >= 0.0 && watermark <= 1.0, "watermark must be in [0, 1], got ",
                 watermark);
  return static_cast<std::int64_t>(watermark * static_cast<double>(num_blocks));
}

void check_args(const AllocateSlotsArgs& args) {
  check_tokens(args.num_new_tokens, "num_new_tokens");
  check_tokens(args.num_new_computed_tokens, "num_new_computed_tokens");
  check_tokens(args.num_lookahead_tokens, "num_lookahead_tokens");
  check_tokens(args.num_external_computed_tokens, "num_external_computed_tokens");
  check_tokens(args.reserved_blocks, "reserved_blocks");
  PAGED_KV_CHECK(args.num_new_tokens > 0 || args.num_external_computed_tokens > 0 ||
                     args.num_new_computed_tokens > 0,
                 "num_new_tokens must be positive when there are no computed tokens to adopt");
}

bool is_empty(const KVCacheBlocks& blocks) {
  return std::ranges::all_of(blocks.block_ids, [](const auto& ids) { return ids.empty(); });
}

}  // namespace

KVCacheManager::KVCacheManager(const KVCacheConfig& kv_cache_config,
                               const KVCacheManagerOptions& options)
    : kv_cache_config_(kv_cache_config),
      options_(options),
      coordinator_(get_kv_cache_coordinator(kv_cache_config, coordinator_options(options))),
      watermark_blocks_(to_watermark_blocks(options.watermark, kv_cache_config.num_blocks)),
      num_new_blocks_(kv_cache_config.kv_cache_groups.size()) {
  PAGED_KV_CHECK(options.max_model_len <= kMaxTokens, "max_model_len must be at most 2**40, got ",
                 options.max_model_len);
  if (options.log_stats) prefix_cache_stats_.emplace();
}

ComputedBlocks KVCacheManager::get_computed_blocks(const Request& request) {
  if (!prefix_cache_lookup_enabled(request)) {
    ComputedBlocks none;
    none.blocks.block_ids.resize(num_kv_cache_groups());
    return none;
  }
  CacheHit hit =
      coordinator_->find_longest_cache_hit(request.block_hashes(), request.num_tokens() - 1);
  if (hit.num_tokens > 0 && request.options().reports_reused_blocks) {
    report_reused_blocks(request, hit.blocks);
  }
  const std::int64_t num_uncached = hit.num_uncached_common_prefix_tokens;
  return {std::move(hit.blocks), hit.num_tokens,
          num_uncached > 0 ? hit.num_tokens + num_uncached : 0};
}

NoHitReport KVCacheManager::why_no_hit(const Request& request) const {
  return explain_hit(*coordinator_, request, options_.enable_caching);
}

void KVCacheManager::report_reused_blocks(const Request& request, const KVCacheBlocks& blocks) {
  KVEventQueue* events = block_pool().kv_events();
  if (events == nullptr) return;
  for (std::size_t group = 0; group < blocks.block_ids.size(); ++group) {
    const std::int64_t num_blocks = std::ssize(blocks.block_ids[group]);
    if (num_blocks == 0) continue;
    events->push_made([&] {
      return make_block_stored_event(
          request,
          {.hash_block_size = options_.hash_block_size,
           .block_size = coordinator_->manager(group).block_size(),
           .start_block = 0,
           .end_block = num_blocks,
           .kv_cache_group_id = GroupId(static_cast<std::int32_t>(group))},
          {});
    });
  }
}

AllocationPlan KVCacheManager::plan_allocate_slots(const Request& request,
                                                   const AllocateSlotsArgs& args) {
  AllocationPlan plan = checked_plan(request, args);
  const bool is_new = !plan.request_idx.valid();
  if (is_new) plan.request_idx = request_table_.find_or_add(request);
  try {
    coordinator_->reserve(slot_demand(plan), plan.new_computed_blocks);
  } catch (const std::bad_alloc&) {
    if (is_new) request_table_.remove(plan.request_idx);
    throw;
  }
  return plan;
}

AllocationPlan KVCacheManager::checked_plan(const Request& request,
                                            const AllocateSlotsArgs& args) const {
  check_args(args);
  check_tokens(request.progress.num_computed_tokens, "num_computed_tokens");
  check_tokens(request.progress.num_in_flight_tokens, "num_in_flight_tokens");
  AllocationPlan plan;
  plan.request_idx = request_table_.find(request);
  if (args.new_computed_blocks != nullptr) {
    PAGED_KV_CHECK(args.new_computed_blocks->block_ids.size() == num_kv_cache_groups(),
                   "new_computed_blocks must have ", num_kv_cache_groups(), " groups, got ",
                   args.new_computed_blocks->block_ids.size());
    if (!is_empty(*args.new_computed_blocks)) plan.new_computed_blocks = args.new_computed_blocks;
  }
  plan.num_local_computed_tokens =
      request.progress.num_computed_tokens + args.num_new_computed_tokens;
  plan.total_computed_tokens = plan.num_local_computed_tokens + args.num_external_computed_tokens;
  plan.adopts_computed_tokens =
      plan.new_computed_blocks != nullptr || args.num_external_computed_tokens > 0;
  if (plan.adopts_computed_tokens) {
    check_adoption(plan);
    // A request whose blocks are cached already takes over nothing; tokens from outside only count.
    if (coordinator_->tracks_cached_blocks(plan.request_idx)) plan.adopts_computed_tokens = false;
  }
  plan.num_tokens_to_cache =
      std::min(std::min(plan.total_computed_tokens, options_.max_model_len) + args.num_new_tokens,
               request.num_tokens());
  if (!args.delay_cache_blocks) check_can_be_cached(request, plan.num_tokens_to_cache);
  plan.num_tokens_need_slot =
      std::min(std::min(plan.total_computed_tokens, options_.max_model_len) + args.num_new_tokens +
                   args.num_lookahead_tokens,
               options_.max_model_len);
  return plan;
}

void KVCacheManager::check_adoption(const AllocationPlan& plan) const {
  PAGED_KV_CHECK(plan.total_computed_tokens <= options_.max_model_len,
                 "computed tokens must be at most max_model_len (", options_.max_model_len,
                 "), got ", plan.total_computed_tokens);
  if (plan.new_computed_blocks != nullptr) {
    PAGED_KV_CHECK(options_.enable_caching, "new_computed_blocks: prefix caching is off");
    for (const auto& ids : plan.new_computed_blocks->block_ids) {
      coordinator_->block_pool().check_ids(ids);
    }
  }
  const bool is_tracked = coordinator_->tracks_cached_blocks(plan.request_idx);
  PAGED_KV_CHECK((is_tracked && plan.new_computed_blocks == nullptr) ||
                     !coordinator_->holds_blocks(plan.request_idx),
                 "computed tokens can only be given to a request that holds no blocks");
}

void KVCacheManager::check_can_be_cached(const Request& request, std::int64_t num_tokens) const {
  if (!options_.enable_caching) return;
  PAGED_KV_CHECK(num_tokens / options_.hash_block_size <= std::ssize(request.block_hashes()),
                 "request ", request.request_id(), " has ", request.block_hashes().size(),
                 " block hashes of ", options_.hash_block_size, " tokens, ", num_tokens,
                 " tokens are to be cached: was it made with a block hasher of this size?");
}

bool KVCacheManager::whole_request_fits(const Request& request, const AllocationPlan& plan,
                                        std::int64_t num_watermark_blocks) const {
  const SlotDemand demand{
      .request_idx = plan.request_idx,
      .num_tokens = std::min(request.num_tokens(), options_.max_model_len),
      .adopts_computed_tokens = plan.adopts_computed_tokens,
      .new_computed_blocks = {},
      .total_computed_tokens = std::min(plan.total_computed_tokens, options_.max_model_len),
      .apply_admission_cap = true};
  const std::int64_t num_blocks =
      coordinator_->get_num_blocks_to_allocate(demand, plan.new_computed_blocks);
  return num_blocks + num_watermark_blocks <= coordinator_->block_pool().get_num_free_blocks();
}

bool KVCacheManager::try_allocate_slots(const Request& request, const AllocateSlotsArgs& args,
                                        const AllocationPlan& plan) {
  const RequestStatus status = request.progress.status;
  const bool is_admission =
      status == RequestStatus::kWaiting || status == RequestStatus::kPreempted;
  const std::int64_t num_watermark_blocks =
      args.has_scheduled_reqs && is_admission ? watermark_blocks_ : 0;
  if (args.full_sequence_must_fit && !whole_request_fits(request, plan, num_watermark_blocks)) {
    forget_without_blocks(plan.request_idx);
    return false;
  }

  // Before counting, and even if the request is refused: what it no longer needs is of use to
  // others. Steps under way still read from the blocks of their windows.
  const std::int64_t total_computed_tokens =
      std::min(plan.total_computed_tokens, options_.max_model_len);
  coordinator_->remove_skipped_blocks(
      plan.request_idx,
      std::max(total_computed_tokens - request.progress.num_in_flight_tokens, std::int64_t{0}));

  const std::int64_t num_blocks =
      coordinator_->get_num_blocks_to_allocate(slot_demand(plan), plan.new_computed_blocks);
  const std::int64_t num_available =
      block_pool().get_num_free_blocks() - args.reserved_blocks - num_watermark_blocks;
  if (num_blocks > num_available) {
    forget_without_blocks(plan.request_idx);
    return false;
  }

  if (plan.adopts_computed_tokens) {
    coordinator_->allocate_new_computed_blocks(plan.request_idx, plan.new_computed_blocks,
                                               plan.num_local_computed_tokens,
                                               args.num_external_computed_tokens);
  }
  if (num_blocks > 0) {
    coordinator_->allocate_new_blocks(plan.request_idx, plan.num_tokens_need_slot, num_new_blocks_);
  } else {
    std::ranges::fill(num_new_blocks_, 0);
  }
  if (!args.delay_cache_blocks) {
    coordinator_->cache_blocks(request, plan.request_idx, plan.num_tokens_to_cache);
  }
  return true;
}

SlotDemand KVCacheManager::slot_demand(const AllocationPlan& plan) noexcept {
  return {.request_idx = plan.request_idx,
          .num_tokens = plan.num_tokens_need_slot,
          .adopts_computed_tokens = plan.adopts_computed_tokens,
          .new_computed_blocks = {},
          .total_computed_tokens = plan.total_computed_tokens,
          .apply_admission_cap = false};
}

void KVCacheManager::forget_without_blocks(RequestIdx request_idx) noexcept {
  if (!request_idx.valid() || coordinator_->holds_blocks(request_idx)) return;
  if (!coordinator_->tracks_cached_blocks(request_idx)) request_table_.remove(request_idx);
}

std::optional<KVCacheBlocks> KVCacheManager::allocate_slots(const Request& request,
                                                            const AllocateSlotsArgs& args) {
  const AllocationPlan plan = plan_allocate_slots(request, args);
  KVCacheBlocks new_blocks;
  try {
    new_blocks = room_for_new_blocks(plan);
  } catch (const std::bad_alloc&) {
    forget_without_blocks(plan.request_idx);
    throw;
  }
  if (!try_allocate_slots(request, args, plan)) return std::nullopt;
  for (std::size_t group = 0; group < num_kv_cache_groups(); ++group) {
    const auto held = coordinator_->manager(group).blocks(plan.request_idx);
    const auto taken = held.last(static_cast<std::size_t>(num_new_blocks_[group]));
    new_blocks.block_ids[group].assign(taken.begin(), taken.end());
  }
  return new_blocks;
}

// Empty lists that take what the plan may take without allocating.
KVCacheBlocks KVCacheManager::room_for_new_blocks(const AllocationPlan& plan) const {
  const std::int64_t max_num_blocks = coordinator_->block_pool().num_gpu_blocks();
  KVCacheBlocks room;
  room.block_ids.resize(num_kv_cache_groups());
  for (std::size_t group = 0; group < num_kv_cache_groups(); ++group) {
    const auto& manager = coordinator_->manager(group);
    const std::int64_t num_blocks = ceil_div(plan.num_tokens_need_slot, manager.block_size()) -
                                    std::ssize(manager.blocks(plan.request_idx));
    room.block_ids[group].reserve(
        static_cast<std::size_t>(std::clamp(num_blocks, std::int64_t{0}, max_num_blocks)));
  }
  return room;
}

void KVCacheManager::cache_blocks(const Request& request, std::int64_t num_computed_tokens) {
  check_tokens(num_computed_tokens, "num_computed_tokens");
  check_can_be_cached(request, num_computed_tokens);
  const RequestIdx request_idx = request_table_.find(request);
  if (request_idx.valid()) coordinator_->cache_blocks(request, request_idx, num_computed_tokens);
}

void KVCacheManager::free(const Request& request) {
  const RequestIdx request_idx = request_table_.find(request);
  if (!request_idx.valid()) return;
  coordinator_->free(request_idx);
  request_table_.remove(request_idx);
}

std::vector<BlockId> KVCacheManager::pop_blocks_for_free(const Request& request) {
  std::vector<BlockId> blocks;
  const RequestIdx request_idx = request_table_.find(request);
  if (!request_idx.valid()) return blocks;
  coordinator_->pop_blocks_for_free(request_idx, blocks);
  request_table_.remove(request_idx);
  return blocks;
}

void KVCacheManager::remove_skipped_blocks(std::string_view request_id,
                                           std::int64_t processed_computed_tokens) {
  check_tokens(processed_computed_tokens, "processed_computed_tokens");
  coordinator_->remove_skipped_blocks(request_table_.find(request_id), processed_computed_tokens);
}

bool KVCacheManager::reset_prefix_cache() {
  if (!block_pool().reset_prefix_cache()) return false;
  if (prefix_cache_stats_) prefix_cache_stats_->reset = true;
  return true;
}

}  // namespace paged_kv
