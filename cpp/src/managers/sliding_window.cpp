// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/managers/sliding_window.h"

#include "paged_kv/math.h"

#include <algorithm>

namespace paged_kv {
namespace {

// The blocks that were found one after the other, from the right to the left.
class Run {
 public:
  explicit Run(std::size_t num_groups) : num_groups_(num_groups) {}

  // Where to put the next block's ids, one for each group.
  [[nodiscard]] std::span<BlockId> next() {
    ids_.resize((num_blocks_ + 1) * num_groups_);
    return std::span(ids_).last(num_groups_);
  }
  void keep_next() noexcept { ++num_blocks_; }
  void clear() noexcept { num_blocks_ = 0; }
  [[nodiscard]] std::int64_t size() const noexcept {
    return static_cast<std::int64_t>(num_blocks_);
  }

  // Makes `blocks` the first `num_hit_blocks` blocks of the request: those of the run that begins
  // at `first_block`, and null blocks before them.
  void write(std::size_t group, std::int64_t first_block, std::int64_t num_hit_blocks,
             std::vector<BlockId>& blocks) const {
    blocks.assign(static_cast<std::size_t>(num_hit_blocks), kNullBlockId);
    for (std::int64_t i = first_block; i < num_hit_blocks; ++i) {
      const auto position = num_blocks_ - 1 - static_cast<std::size_t>(i - first_block);
      blocks[static_cast<std::size_t>(i)] = ids_[position * num_groups_ + group];
    }
  }

 private:
  std::size_t num_groups_;
  std::size_t num_blocks_ = 0;
  std::vector<BlockId> ids_;
};

// The largest n <= num_blocks such that n blocks end at a multiple of alignment_tokens.
std::int64_t align(std::int64_t num_blocks, std::int64_t block_size,
                   std::int64_t alignment_tokens) noexcept {
  if (block_size == alignment_tokens) return num_blocks;
  while (num_blocks * block_size % alignment_tokens != 0) --num_blocks;
  return num_blocks;
}

}  // namespace

SlidingWindowManager::SlidingWindowManager(const std::shared_ptr<const SlidingWindowSpec>& spec,
                                           BlockPool& block_pool, GroupId kv_cache_group_id,
                                           const RequestLimits& limits)
    : SingleTypeKVCacheManager(spec, block_pool, kv_cache_group_id, limits),
      sliding_window_(spec->sliding_window()),
      num_retained_tokens_(spec->sliding_window() - 1 + spec->extra_retained_tokens()) {}

std::int64_t SlidingWindowManager::num_contiguous_blocks_for_hit(bool use_eagle) const noexcept {
  return ceil_div(sliding_window_ - 1, block_size()) + (use_eagle ? 1 : 0);
}

std::int64_t SlidingWindowManager::find_longest_cache_hit(
    const CacheHitQuery& query, std::span<std::vector<BlockId>> hit_blocks) const {
  const CoarseBlockHashes hashes(query.block_hashes, block_pool().hash_block_size(), block_size());
  const auto groups = query.kv_cache_group_ids;
  const std::int64_t num_dropped = query.drop_eagle_block ? 1 : 0;
  const std::int64_t num_needed = num_contiguous_blocks_for_hit(query.drop_eagle_block);
  const std::int64_t alignment = query.alignment_tokens;

  Run run(groups.size());
  std::int64_t first_block = std::min(query.max_length / block_size(), hashes.size());
  std::int64_t num_hit_blocks = 0;
  bool is_enough = false;
  while (!is_enough && first_block > 0) {
    --first_block;
    if (!block_pool().find_cached_blocks(hashes[first_block], groups, run.next())) {
      run.clear();
      continue;
    }
    if (run.size() == 0) {
      // A run must end where a hit can end.
      const std::int64_t end = (first_block + 1 - num_dropped) * block_size();
      if (block_size() != alignment && end % alignment != 0) continue;
    }
    run.keep_next();
    is_enough = run.size() >= num_needed;
  }
  // A shorter run counts if it begins with the request.
  num_hit_blocks =
      is_enough ? first_block + run.size() : align(run.size(), block_size(), alignment);
  if (num_dropped > 0 && num_hit_blocks > 0) {
    num_hit_blocks = align(num_hit_blocks - num_dropped, block_size(), alignment);
  }
  for (std::size_t i = 0; i < groups.size(); ++i) {
    run.write(i, first_block, num_hit_blocks, hit_blocks[groups[i].index()]);
  }
  return num_hit_blocks * block_size();
}

std::span<const std::uint8_t> SlidingWindowManager::reachable_block_mask(
    const Request& request, std::int64_t start_block, std::int64_t end_block,
    std::vector<std::uint8_t>& mask) {
  const std::int64_t alignment = policy().scheduler_block_size;
  // Blocks that are not aligned with hits: each may be needed.
  if (alignment % block_size() != 0) return {};
  const auto& retention = policy().retention_interval;
  const std::int64_t segment_tokens = retention ? *retention : alignment;
  const std::int64_t segment_blocks = segment_tokens / block_size();
  if (segment_tokens > 0 && num_contiguous_blocks_for_hit(use_eagle()) >= segment_blocks) return {};

  mask.assign(static_cast<std::size_t>(end_block - start_block), 0);
  if (segment_tokens > 0) mark_tails_of_segments(start_block, segment_blocks, mask);
  if (retention) {
    const ReplayBoundaries replay = replay_boundaries(request.num_prompt_tokens(), policy());
    mark_tail_of_boundary(replay.resend, start_block, mask);
    mark_tail_of_boundary(replay.extension, start_block, mask);
    const std::int64_t shared = request.progress.shared_prefix_boundary;
    if (shared > 0) mark_tail_of_boundary(shared, start_block, mask);
  }
  return mask;
}

// Of every segment the last blocks, one further to the right with EAGLE.
void SlidingWindowManager::mark_tails_of_segments(std::int64_t start_block,
                                                  std::int64_t segment_blocks,
                                                  std::span<std::uint8_t> mask) const {
  const std::int64_t num_needed = num_contiguous_blocks_for_hit(use_eagle());
  const std::int64_t shift = use_eagle() ? 1 : 0;
  for (std::size_t i = 0; i < mask.size(); ++i) {
    const std::int64_t block_idx = start_block + static_cast<std::int64_t>(i) - shift;
    if (block_idx >= 0 && block_idx % segment_blocks >= segment_blocks - num_needed) mask[i] = 1;
  }
}

// Of the tokens before a position at which a hit can end, the last blocks.
void SlidingWindowManager::mark_tail_of_boundary(std::int64_t boundary, std::int64_t start_block,
                                                 std::span<std::uint8_t> mask) const {
  const std::int64_t alignment = policy().scheduler_block_size;
  const std::int64_t end_block = start_block + std::ssize(mask);
  const std::int64_t end = boundary / alignment * alignment / block_size() + (use_eagle() ? 1 : 0);
  const std::int64_t begin = end - num_contiguous_blocks_for_hit(use_eagle());
  for (std::int64_t i = std::max(start_block, begin); i < std::min(end_block, end); ++i) {
    mask[static_cast<std::size_t>(i - start_block)] = 1;
  }
}

ReplayBoundaries replay_boundaries(std::int64_t num_prompt_tokens,
                                   const PrefixCachePolicy& policy) noexcept {
  const std::int64_t last = std::max(num_prompt_tokens - 1, std::int64_t{0});
  if (!policy.any_group_uses_eagle) return {last, last};
  const std::int64_t block = policy.scheduler_block_size;
  return {std::max(last / block * block - block, std::int64_t{0}),
          std::max(num_prompt_tokens / block * block - block, std::int64_t{0})};
}

}  // namespace paged_kv
