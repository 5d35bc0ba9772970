// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "paged_kv/block_pool.h"
#include "paged_kv/kv_cache_blocks.h"
#include "paged_kv/kv_cache_config.h"
#include "paged_kv/kv_cache_coordinator.h"
#include "paged_kv/kv_events.h"
#include "paged_kv/no_hit_report.h"
#include "paged_kv/prefix_cache_stats.h"
#include "paged_kv/request.h"
#include "paged_kv/request_table.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace paged_kv {

struct KVCacheManagerOptions {
  std::int64_t max_model_len = 0;  // tokens; no request gets slots past it
  std::int64_t scheduler_block_size = 0;
  std::int64_t hash_block_size = 0;
  // Tokens that are scheduled and not processed yet, at most; nullopt: max_model_len.
  std::optional<std::int64_t> max_in_flight_tokens;
  bool enable_caching = true;
  bool use_eagle = false;
  std::int64_t num_prefill_lookahead = 0;
  bool log_stats = false;
  bool enable_kv_cache_events = false;
  std::shared_ptr<KVCacheMetricsCollector> metrics_collector;
  // Share of the pool that stays free when a request is admitted beside others.
  double watermark = 0.0;
  // Which free blocks are reused first; null: the least recently used.
  std::shared_ptr<EvictionPolicy> eviction_policy = nullptr;
  // Evictions that why_no_hit() can tell of: the last so many.
  std::int64_t num_remembered_evictions = 0;
  // Those of the requests whose block hashes are XXH3's; needed to cache them.
  std::shared_ptr<PrefixContents> prefix_contents = nullptr;
};

struct AllocateSlotsArgs {
  std::int64_t num_new_tokens = 0;  // to compute, drafts included
  // The hit that get_computed_blocks() found, for a request that holds no blocks.
  std::int64_t num_new_computed_tokens = 0;
  const KVCacheBlocks* new_computed_blocks = nullptr;
  std::int64_t num_lookahead_tokens = 0;  // slots for drafts to come
  // Computed elsewhere, to be loaded into blocks that are taken now.
  std::int64_t num_external_computed_tokens = 0;
  bool delay_cache_blocks = false;  // cache_blocks() follows when they have arrived
  // Only if all tokens that the request has now would fit.
  bool full_sequence_must_fit = false;
  std::int64_t reserved_blocks = 0;  // that stay free for others
  // Others run in this step: the watermark counts.
  bool has_scheduled_reqs = true;
};

// An allocation that has been checked, as far as it can be told before anything changes.
struct AllocationPlan {
  RequestIdx request_idx;
  bool adopts_computed_tokens = false;
  const KVCacheBlocks* new_computed_blocks = nullptr;  // null: none, in any group
  std::int64_t num_local_computed_tokens = 0;
  std::int64_t total_computed_tokens = 0;
  std::int64_t num_tokens_to_cache = 0;
  std::int64_t num_tokens_need_slot = 0;  // those with slots included
};

struct ComputedBlocks {
  KVCacheBlocks blocks;
  std::int64_t num_tokens = 0;
  // RequestProgress::shared_prefix_boundary, as far as this lookup shows; 0: none.
  std::int64_t shared_prefix_boundary = 0;
};

// Which blocks each request holds: prefix hits, allocation, caching, release. It holds ids and
// counters, never tensors.
//
// A request is known by its id: two live requests with one id share their blocks. A call that
// throws changes nothing, and neither does an allocation that is refused, except that blocks which
// the request no longer needs are given back even so. That holds where memory is wanting, too: what
// a call needs is taken before the first change. Only cache_blocks() goes group by group, and may
// be called again. Events and metrics have rules of their own for that: kv_events.h, and
// kv_cache_metrics.h.
//
// Invariants, checked by check_integrity():
//   those of the pool (I1 .. I7), of the request table (RT1, RT2) and of the managers (G1 .. G3);
//   K1  a block is in no more places of tables than it has holders;
//   K2  tables that share a block are of one group, and have it at the same place.
//
// Cost: given per method. None depends on the size of the pool, none but fork() on the tokens a
// request has.
// Thread rule: one owner thread.
// Source: vLLM 0.32 v1/core/kv_cache_manager.py::KVCacheManager.
class KVCacheManager {
 public:
  KVCacheManager(const KVCacheConfig& kv_cache_config, const KVCacheManagerOptions& options);
  KVCacheManager(const KVCacheManager&) = delete;
  KVCacheManager& operator=(const KVCacheManager&) = delete;

  [[nodiscard]] const KVCacheConfig& kv_cache_config() const noexcept { return kv_cache_config_; }
  [[nodiscard]] const KVCacheManagerOptions& options() const noexcept { return options_; }
  [[nodiscard]] std::size_t num_kv_cache_groups() const noexcept {
    return coordinator_->num_groups();
  }
  [[nodiscard]] BlockPool& block_pool() noexcept { return coordinator_->block_pool(); }
  [[nodiscard]] const KVCacheCoordinator& coordinator() const noexcept { return *coordinator_; }
  // Share of the pool that requests hold, 0.0 .. 1.0.
  [[nodiscard]] double usage() const noexcept { return coordinator_->block_pool().get_usage(); }

  // The longest cached prefix of a request without blocks. At least one token is left to compute.
  // Changes nothing, so that allocate_slots() must come before the next allocation.
  // O(blocks of the hit), O(blocks of the request) with sliding windows.
  [[nodiscard]] ComputedBlocks get_computed_blocks(const Request& request);

  // Why get_computed_blocks() finds no more than it does: the first block that is missing, and the
  // reason. Changes nothing, no statistics either. For diagnosis: see no_hit_report.h on its cost.
  [[nodiscard]] NoHitReport why_no_hit(const Request& request) const;

  // Gives a request slots for its next tokens, takes over its hit, and caches the blocks that the
  // tokens fill. Returns the blocks that were taken for them; nullopt if too few are free.
  // O(blocks taken, adopted, cached or given back).
  [[nodiscard]] std::optional<KVCacheBlocks> allocate_slots(const Request& request,
                                                            const AllocateSlotsArgs& args);
  // The same without a list of the new blocks: those are the last num_new_blocks()[g] of
  // blocks(request, g). Allocates no memory, unless the request's table grows. False: refused.
  [[nodiscard]] bool try_allocate_slots(const Request& request, const AllocateSlotsArgs& args) {
    return try_allocate_slots(request, args, plan_allocate_slots(request, args));
  }
  // In two steps: the first throws what try_allocate_slots() would throw, and changes nothing then;
  // the second takes the plan of the same arguments, as long as nothing has happened to the request
  // in between, and does not throw: the first has taken the memory that it needs. A request without
  // blocks is known from the first on, until it is refused, freed or forgotten. O(groups) without a
  // hit.
  [[nodiscard]] AllocationPlan plan_allocate_slots(const Request& request,
                                                   const AllocateSlotsArgs& args);
  [[nodiscard]] bool try_allocate_slots(const Request& request, const AllocateSlotsArgs& args,
                                        const AllocationPlan& plan);
  // Per group, of the last successful allocation.
  [[nodiscard]] std::span<const std::int64_t> num_new_blocks() const noexcept {
    return num_new_blocks_;
  }

  // For parallel sampling and beam search: lets `child`, which holds no blocks, go on where
  // `parent` is, and sets its num_computed_tokens. In every group it shares the parent's blocks,
  // null blocks where the parent has them. A block that will be written again (the last, if it is
  // filled in part; with num_prefill_lookahead, what the draft model computes again) is not shared:
  // the child takes a new one, and the copy is returned. Blocks after the computed tokens stay the
  // parent's.
  //
  // The copies must run after the steps of the parent that are under way, and before the next step
  // of either; they are independent of each other. The parent's computed tokens must be final:
  // drafts that may be rejected are no part of them. Shared blocks count as used once more for
  // eviction policies and metrics, and no event tells of them.
  //
  // nullopt, and no change, if too few blocks are free; the watermark does not count. Throws
  // std::invalid_argument unless `parent` has computed tokens and holds their blocks, `child` holds
  // none, and both begin with the same tokens (with caching: and keys) up to there.
  // O(blocks shared or copied); the tokens are compared.
  [[nodiscard]] std::optional<std::vector<GroupBlockCopy>> fork(const Request& parent,
                                                                Request& child);

  // Makes the full blocks of the first `num_computed_tokens` tokens findable.
  void cache_blocks(const Request& request, std::int64_t num_computed_tokens);

  // Forgets a request that holds no blocks: a plan for it is not carried out.
  void forget_without_blocks(const Request& request) noexcept {
    forget_without_blocks(request_table_.find(request));
  }

  // Gives back a request's blocks, the last first. Needs no memory. A request without blocks is
  // left alone.
  void free(const Request& request);
  // Forgets a request, whose blocks stay held: BlockPool::free_blocks() must follow, the last
  // first. Group after group.
  [[nodiscard]] std::vector<BlockId> pop_blocks_for_free(const Request& request);

  // Gives back the blocks that no token after the first `processed_computed_tokens` needs.
  void remove_skipped_blocks(std::string_view request_id, std::int64_t processed_computed_tokens);

  void evict_blocks(std::span<const BlockId> block_ids) { block_pool().evict_blocks(block_ids); }
  // False, and no change, while a block is held.
  [[nodiscard]] bool reset_prefix_cache();

  // Where the managers have the request; invalid if it has no blocks. O(1).
  [[nodiscard]] RequestIdx find(const Request& request) const {
    return request_table_.find(request);
  }
  // A request's blocks in one group, null blocks where none is held any more. O(1), no copy.
  [[nodiscard]] std::span<const BlockId> blocks(const Request& request, std::size_t group) const {
    return coordinator_->manager(group).blocks(find(request));
  }
  // In all groups. O(blocks).
  [[nodiscard]] KVCacheBlocks get_blocks(std::string_view request_id) const;
  // Of these, the blocks of the first `num_computed_tokens` tokens.
  [[nodiscard]] KVCacheBlocks get_blocks_for_computed_tokens(
      std::string_view request_id, std::int64_t num_computed_tokens) const;
  // Tokens of the request that all groups have in the cache, as far as the blocks' names tell.
  // O(blocks).
  [[nodiscard]] std::int64_t estimate_cached_tokens(const Request& request) const;
  // The first blocks of a hit, for `num_computed_tokens` tokens: a multiple of every block size.
  [[nodiscard]] KVCacheBlocks truncate_computed_blocks(const KVCacheBlocks& blocks,
                                                       std::int64_t num_computed_tokens) const;

  [[nodiscard]] bool prefix_cache_lookup_enabled(const Request& request) const noexcept {
    return options_.enable_caching && !request.options().skip_reading_prefix_cache;
  }
  // With log_stats only.
  void record_prefix_cache_stats(const Request& request, std::int64_t num_hits) noexcept;
  // Since the last call; nullopt without log_stats.
  [[nodiscard]] std::optional<PrefixCacheStats> make_prefix_cache_stats() noexcept;

  // Since the last call, in order.
  [[nodiscard]] std::vector<KVCacheEvent> take_events();

  // Throws InvariantError if an invariant does not hold. O(num_blocks + blocks of all requests).
  void check_integrity() const;

 private:
  [[nodiscard]] AllocationPlan checked_plan(const Request& request,
                                            const AllocateSlotsArgs& args) const;
  void check_adoption(const AllocationPlan& plan) const;
  void check_fork(const Request& parent, const Request& child) const;
  void check_can_be_cached(const Request& request, std::int64_t num_tokens) const;
  [[nodiscard]] bool whole_request_fits(const Request& request, const AllocationPlan& plan,
                                        std::int64_t num_watermark_blocks) const;
  [[nodiscard]] static SlotDemand slot_demand(const AllocationPlan& plan) noexcept;
  void forget_without_blocks(RequestIdx request_idx) noexcept;
  [[nodiscard]] KVCacheBlocks room_for_new_blocks(const AllocationPlan& plan) const;
  void report_reused_blocks(const Request& request, const KVCacheBlocks& blocks);

  KVCacheConfig kv_cache_config_;
  KVCacheManagerOptions options_;
  std::unique_ptr<KVCacheCoordinator> coordinator_;
  RequestTable request_table_;
  std::int64_t watermark_blocks_;
  std::optional<PrefixCacheStats> prefix_cache_stats_;
  std::vector<std::int64_t> num_new_blocks_;
};

}  // namespace paged_kv
