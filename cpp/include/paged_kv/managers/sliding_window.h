// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "paged_kv/managers/single_type.h"

#include <vector>

namespace paged_kv {

// A query sees the last W tokens, its own included; blocks before them are given back.
//
// A hit of n tokens needs the blocks of its last W - 1 tokens alone, so it is looked for from the
// right: the last run of enough cached blocks. Blocks that no hit can need are not cached.
//
// Source: vLLM 0.32 v1/core/single_type_kv_cache_manager.py::SlidingWindowManager.
class SlidingWindowManager final : public SingleTypeKVCacheManager {
 public:
  SlidingWindowManager(const std::shared_ptr<const SlidingWindowSpec>& spec, BlockPool& block_pool,
                       GroupId kv_cache_group_id, const RequestLimits& limits);

  std::int64_t find_longest_cache_hit(const CacheHitQuery& query,
                                      std::span<std::vector<BlockId>> hit_blocks) const override;
  [[nodiscard]] std::int64_t get_num_skipped_tokens(
      std::int64_t num_computed_tokens) const override {
    const std::int64_t num_skipped = num_computed_tokens - num_retained_tokens_;
    return num_skipped > 0 ? num_skipped : 0;
  }

 protected:
  [[nodiscard]] std::span<const std::uint8_t> reachable_block_mask(
      const Request& request, std::int64_t start_block, std::int64_t end_block,
      std::vector<std::uint8_t>& mask) override;

 private:
  // Blocks that the last W - 1 tokens before a block boundary can reach into, and the one that
  // EAGLE matches and drops.
  [[nodiscard]] std::int64_t num_contiguous_blocks_for_hit(bool use_eagle) const noexcept;
  void mark_tails_of_segments(std::int64_t start_block, std::int64_t segment_blocks,
                              std::span<std::uint8_t> mask) const;
  void mark_tail_of_boundary(std::int64_t boundary, std::int64_t start_block,
                             std::span<std::uint8_t> mask) const;

  std::int64_t sliding_window_;
  std::int64_t num_retained_tokens_;
};

// Where a later request with the same prompt, or a longer one, can go on: the tokens before these
// positions must be findable. Both are the same without EAGLE.
struct ReplayBoundaries {
  std::int64_t resend = 0;     // the same prompt; its last token is computed again
  std::int64_t extension = 0;  // a prompt that goes on
};

// Source: vLLM 0.32 v1/core/kv_cache_coordinator.py::replay_boundaries.
[[nodiscard]] ReplayBoundaries replay_boundaries(std::int64_t num_prompt_tokens,
                                                 const PrefixCachePolicy& policy) noexcept;

}  // namespace paged_kv
