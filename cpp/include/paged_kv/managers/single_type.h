// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "paged_kv/block_pool.h"
#include "paged_kv/ids.h"
#include "paged_kv/kv_cache_blocks.h"
#include "paged_kv/kv_cache_spec.h"
#include "paged_kv/request.h"

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace paged_kv {

// Which blocks can ever serve a hit, as far as that depends on all groups together.
struct PrefixCachePolicy {
  std::int64_t scheduler_block_size = 0;  // every hit is a multiple, in tokens
  // KVCacheConfig::prefix_cache_retention_interval.
  std::optional<std::int64_t> retention_interval;
  bool any_group_uses_eagle = false;
  // This group drops the last block of a hit.
  bool use_eagle = false;
};

// What a lookup asks of a manager. It answers for all groups of its spec at once: a block counts
// only if every one of them has it.
struct CacheHitQuery {
  std::span<const BlockHash> block_hashes;  // of hash_block_size tokens each
  std::int64_t max_length = 0;              // in tokens
  std::span<const GroupId> kv_cache_group_ids;
  bool drop_eagle_block = false;
  std::int64_t alignment_tokens = 0;  // the hit is a multiple
};

// What an allocation asks of a manager.
struct SlotDemand {
  RequestIdx request_idx;       // invalid: the request has no blocks
  std::int64_t num_tokens = 0;  // that need slots, those with slots included
  // A new request that takes over blocks of the prefix cache, or tokens from outside.
  bool adopts_computed_tokens = false;
  std::span<const BlockId> new_computed_blocks;
  std::int64_t total_computed_tokens = 0;
  // Count no more than the request ever holds at a time.
  bool apply_admission_cap = false;
};

// The tokens of a request that a fork of it begins with.
struct ForkedTokens {
  std::int64_t num_tokens = 0;        // with slots
  std::int64_t num_final_tokens = 0;  // of these, from the first on: those never written again
};

// The blocks of all requests in one cache group: which it holds, and which are cached.
//
// Subclasses decide which blocks a kind of attention still needs, and what is a hit.
//
// Methods that change something are called by a coordinator, which has checked that they cannot
// fail. Rows are those of a RequestTable; an invalid one stands for a request without blocks.
//
// Invariants, checked by check_integrity():
//   G1  of a request's blocks those that are not null are held;
//   G2  the leading num_cached_blocks of a request's blocks exist;
//   G3  the leading num_skipped_blocks() are null.
//
// Cost: linear in the blocks that are taken, adopted, cached or given back; a decode step that does
// none of these costs O(1), however long the request and however large the pool.
// Thread rule: one owner thread.
// Source: vLLM 0.32 v1/core/single_type_kv_cache_manager.py::SingleTypeKVCacheManager.
class SingleTypeKVCacheManager {
 public:
  // `limits` caps what admission counts for kinds of attention that give back blocks.
  SingleTypeKVCacheManager(KVCacheSpecPtr kv_cache_spec, BlockPool& block_pool,
                           GroupId kv_cache_group_id, const RequestLimits& limits);
  virtual ~SingleTypeKVCacheManager() = default;
  SingleTypeKVCacheManager(const SingleTypeKVCacheManager&) = delete;
  SingleTypeKVCacheManager& operator=(const SingleTypeKVCacheManager&) = delete;

  void set_policy(const PrefixCachePolicy& policy) noexcept { policy_ = policy; }
  void set_uses_eagle(bool use_eagle) noexcept { policy_.use_eagle = use_eagle; }

  [[nodiscard]] const KVCacheSpec& kv_cache_spec() const noexcept { return *kv_cache_spec_; }
  [[nodiscard]] std::int64_t block_size() const noexcept { return block_size_; }
  [[nodiscard]] bool use_eagle() const noexcept { return policy_.use_eagle; }

  // A request's blocks in order, null blocks where none is held any more.
  [[nodiscard]] std::span<const BlockId> blocks(RequestIdx request_idx) const noexcept {
    if (!has_row(request_idx)) return {};
    return rows_[request_idx.index()].blocks;
  }
  // So many of them, from the first on, were given back or never taken over, since no token to come
  // needs them.
  [[nodiscard]] std::int64_t num_skipped_blocks(RequestIdx request_idx) const noexcept {
    return has_row(request_idx) ? rows_[request_idx.index()].num_skipped_blocks : 0;
  }
  // Whether it is known which of the request's blocks are cached: once it took over cached blocks
  // or had one cached. It can take over blocks only before that.
  [[nodiscard]] bool tracks_cached_blocks(RequestIdx request_idx) const noexcept {
    return has_row(request_idx) && rows_[request_idx.index()].num_cached_blocks != kNotTracked;
  }

  // How many blocks of the free queue the demand takes.
  [[nodiscard]] std::int64_t get_num_blocks_to_allocate(const SlotDemand& demand) const;

  // Takes the memory for what the demand would write down, so that the next three need none.
  // Changes nothing that can be seen.
  void reserve(const SlotDemand& demand);

  // Takes over the blocks of a hit, except those that the request no longer needs.
  void add_local_computed_blocks(RequestIdx request_idx, std::span<const BlockId> blocks,
                                 std::int64_t total_computed_tokens);
  // Takes blocks for tokens that come from outside. After every group took over its hit: new blocks
  // must not be those of another group's hit.
  void allocate_external_computed_blocks(RequestIdx request_idx, std::int64_t total_computed_tokens,
                                         std::int64_t num_external_computed_tokens);
  // Takes blocks for `num_tokens` tokens in all. Returns how many: they are the request's last.
  std::int64_t allocate_new_blocks(RequestIdx request_idx, std::int64_t num_tokens);

  // How many blocks fork() takes from `new_blocks`.
  [[nodiscard]] std::int64_t num_blocks_to_copy(RequestIdx parent_idx,
                                                const ForkedTokens& tokens) const noexcept;
  // So that giving the request so many blocks does not allocate.
  void reserve_blocks(RequestIdx request_idx, std::int64_t num_blocks);
  // Gives a request without blocks those of its parent. Blocks whose tokens are final are shared,
  // the others copied: new blocks, from the front of `new_blocks`, stand in their place. Null
  // blocks stay null. Both requests have reserved blocks, `copies` has room.
  void fork(RequestIdx parent_idx, RequestIdx child_idx, const ForkedTokens& tokens,
            std::span<const BlockId>& new_blocks, std::vector<GroupBlockCopy>& copies);

  // Makes the full blocks of the first `num_tokens` tokens findable, as far as they can serve a
  // hit.
  virtual void cache_blocks(const Request& request, RequestIdx request_idx,
                            std::int64_t num_tokens);

  // Gives back the blocks that no token after the first `num_computed_tokens` needs.
  void remove_skipped_blocks(RequestIdx request_idx, std::int64_t num_computed_tokens);

  // Forgets the request and appends its blocks to `blocks`, still held.
  void pop_blocks_for_free(RequestIdx request_idx, std::vector<BlockId>& blocks);
  // Forgets the request and gives back its blocks, the last first.
  void free(RequestIdx request_idx);

  // The longest hit: its blocks to hit_blocks[g] for each group id g of the query, its tokens as
  // the result. Null blocks stand for those that are not needed. Does not touch the blocks.
  virtual std::int64_t find_longest_cache_hit(const CacheHitQuery& query,
                                              std::span<std::vector<BlockId>> hit_blocks) const = 0;

  // Leading tokens that the token after the first `num_computed_tokens` does not need.
  [[nodiscard]] virtual std::int64_t get_num_skipped_tokens(
      std::int64_t num_computed_tokens) const = 0;

  // Throws InvariantError if one of G1 .. G3 does not hold. O(blocks of all requests).
  void check_integrity() const;

 protected:
  // Which of the blocks [start_block, end_block) can serve a hit: 1 or 0 for each. Empty: all. Lies
  // in `mask`, if anywhere.
  [[nodiscard]] virtual std::span<const std::uint8_t> reachable_block_mask(
      const Request& request, std::int64_t start_block, std::int64_t end_block,
      std::vector<std::uint8_t>& mask);

  [[nodiscard]] BlockPool& block_pool() const noexcept { return block_pool_; }
  [[nodiscard]] GroupId kv_cache_group_id() const noexcept { return kv_cache_group_id_; }
  [[nodiscard]] const PrefixCachePolicy& policy() const noexcept { return policy_; }

 private:
  static constexpr std::int64_t kNotTracked = -1;
  struct Row {
    std::vector<BlockId> blocks;
    std::int64_t num_cached_blocks = kNotTracked;
    std::int64_t num_skipped_blocks = 0;

    // Keeps the memory, for the row's next request.
    void clear() noexcept {
      blocks.clear();
      num_cached_blocks = kNotTracked;
      num_skipped_blocks = 0;
    }
  };

  [[nodiscard]] bool has_row(RequestIdx request_idx) const noexcept {
    return request_idx.valid() && request_idx.index() < rows_.size();
  }
  [[nodiscard]] Row& row(RequestIdx request_idx);
  [[nodiscard]] std::int64_t num_skipped_blocks(std::int64_t num_computed_tokens) const {
    return get_num_skipped_tokens(num_computed_tokens) / block_size_;
  }

  // The request's blocks that a fork of it begins with.
  [[nodiscard]] std::span<const BlockId> blocks_to_share(RequestIdx parent_idx,
                                                         const ForkedTokens& tokens) const noexcept;
  [[nodiscard]] std::span<const BlockId> blocks_to_copy(RequestIdx parent_idx,
                                                        const ForkedTokens& tokens) const noexcept;

  KVCacheSpecPtr kv_cache_spec_;
  BlockPool& block_pool_;
  GroupId kv_cache_group_id_;
  std::int64_t block_size_;
  bool recycles_blocks_;
  std::optional<std::int64_t> max_admission_blocks_;
  PrefixCachePolicy policy_;
  std::vector<Row> rows_;
  std::vector<std::uint8_t> mask_;  // kept, so that caching a block does not allocate
};

}  // namespace paged_kv
