// SPDX-License-Identifier: Apache-2.0
//
// How a request is forked, from the manager down to the cache groups.
#include "paged_kv/check.h"
#include "paged_kv/kv_cache_coordinator.h"
#include "paged_kv/kv_cache_manager.h"
#include "paged_kv/managers/single_type.h"
#include "paged_kv/math.h"

#include <algorithm>

namespace paged_kv {
namespace {

std::span<const std::int32_t> first_tokens(const Request& request, std::int64_t num_tokens) {
  return request.all_token_ids().first(to_size(num_tokens));
}

// Whether requests with the same tokens have the same block hashes, as far as both have them.
bool have_equal_keys(const Request& a, const Request& b, std::int64_t num_hashes) {
  const std::int64_t num_common =
      std::min({num_hashes, std::ssize(a.block_hashes()), std::ssize(b.block_hashes())});
  if (num_common == 0) return true;
  // Hashes are chained: the last stands for those before it.
  const std::size_t last = to_size(num_common - 1);
  return a.block_hashes()[last] == b.block_hashes()[last];
}

}  // namespace

std::span<const BlockId> SingleTypeKVCacheManager::blocks_to_share(
    RequestIdx parent_idx, const ForkedTokens& tokens) const noexcept {
  return blocks(parent_idx).first(to_size(tokens.num_final_tokens / block_size_));
}

std::span<const BlockId> SingleTypeKVCacheManager::blocks_to_copy(
    RequestIdx parent_idx, const ForkedTokens& tokens) const noexcept {
  return blocks(parent_idx)
      .first(to_size(ceil_div(tokens.num_tokens, block_size_)))
      .subspan(to_size(tokens.num_final_tokens / block_size_));
}

std::int64_t SingleTypeKVCacheManager::num_blocks_to_copy(
    RequestIdx parent_idx, const ForkedTokens& tokens) const noexcept {
  return std::ranges::count_if(blocks_to_copy(parent_idx, tokens),
                               [](BlockId block) { return block != kNullBlockId; });
}

void SingleTypeKVCacheManager::reserve_blocks(RequestIdx request_idx, std::int64_t num_blocks) {
  row(request_idx).blocks.reserve(to_size(num_blocks));
}

void SingleTypeKVCacheManager::fork(RequestIdx parent_idx, RequestIdx child_idx,
                                    const ForkedTokens& tokens,
                                    std::span<const BlockId>& new_blocks,
                                    std::vector<GroupBlockCopy>& copies) {
  const Row& parent = rows_[parent_idx.index()];
  Row& child = rows_[child_idx.index()];
  const auto shared = blocks_to_share(parent_idx, tokens);
  block_pool_.touch(shared);
  child.blocks.assign(shared.begin(), shared.end());
  for (const BlockId block : blocks_to_copy(parent_idx, tokens)) {
    if (block == kNullBlockId) {
      child.blocks.push_back(kNullBlockId);
      continue;
    }
    child.blocks.push_back(new_blocks.front());
    copies.push_back({kv_cache_group_id_, block, new_blocks.front()});
    new_blocks = new_blocks.subspan(1);
  }
  // A copy has another id, and so is not cached, even if the block that it is of is. Not tracked is
  // less than any number.
  child.num_cached_blocks = std::min(parent.num_cached_blocks, std::ssize(shared));
  child.num_skipped_blocks = std::min(parent.num_skipped_blocks, std::ssize(child.blocks));
}

std::int64_t KVCacheCoordinator::num_blocks_to_copy(RequestIdx parent_idx,
                                                    std::int64_t num_tokens) const noexcept {
  const ForkedTokens tokens = forked_tokens(num_tokens);
  std::int64_t num_blocks = 0;
  for (const auto& manager : managers_) {
    num_blocks += manager->num_blocks_to_copy(parent_idx, tokens);
  }
  return num_blocks;
}

void KVCacheCoordinator::fork(RequestIdx parent_idx, RequestIdx child_idx, std::int64_t num_tokens,
                              std::vector<GroupBlockCopy>& copies) {
  // Everything that may throw comes first.
  for (const auto& manager : managers_) {
    manager->reserve_blocks(child_idx, ceil_div(num_tokens, manager->block_size()));
  }
  const std::vector<BlockId> new_blocks =
      block_pool_.get_new_blocks(num_blocks_to_copy(parent_idx, num_tokens));
  std::span<const BlockId> unused_blocks = new_blocks;
  for (const auto& manager : managers_) {
    manager->fork(parent_idx, child_idx, forked_tokens(num_tokens), unused_blocks, copies);
  }
}

void KVCacheManager::check_fork(const Request& parent, const Request& child) const {
  const RequestIdx parent_idx = request_table_.find(parent);
  PAGED_KV_CHECK(coordinator_->holds_blocks(parent_idx), "parent: request ", parent.request_id(),
                 " holds no blocks");
  PAGED_KV_CHECK(!coordinator_->holds_blocks(request_table_.find(child)), "child: request ",
                 child.request_id(), " holds blocks already");
  const std::int64_t num_tokens = parent.progress.num_computed_tokens;
  PAGED_KV_CHECK(num_tokens > 0 && num_tokens <= parent.num_tokens(), "parent: request ",
                 parent.request_id(), " must have computed some of its ", parent.num_tokens(),
                 " tokens and no others, got num_computed_tokens ", num_tokens);
  PAGED_KV_CHECK(
      num_tokens <= child.num_tokens() &&
          std::ranges::equal(first_tokens(parent, num_tokens), first_tokens(child, num_tokens)),
      "child: request ", child.request_id(), " must begin with the ", num_tokens,
      " computed tokens of request ", parent.request_id());
  PAGED_KV_CHECK(!options_.enable_caching ||
                     have_equal_keys(parent, child, num_tokens / options_.hash_block_size),
                 "child: request ", child.request_id(),
                 " has another adapter, salt or input than request ", parent.request_id(),
                 ": their block hashes differ");
  const std::int64_t num_slots = std::min(num_tokens, options_.max_model_len);
  for (std::size_t group = 0; group < num_kv_cache_groups(); ++group) {
    const SingleTypeKVCacheManager& manager = coordinator_->manager(group);
    const std::int64_t num_held = std::ssize(manager.blocks(parent_idx));
    PAGED_KV_CHECK(num_slots <= num_held * manager.block_size(), "parent: request ",
                   parent.request_id(), " has ", num_tokens, " computed tokens, but ", num_held,
                   " blocks of ", manager.block_size(), " tokens in group ", group);
  }
}

std::optional<std::vector<GroupBlockCopy>> KVCacheManager::fork(const Request& parent,
                                                                Request& child) {
  check_fork(parent, child);
  const RequestIdx parent_idx = request_table_.find(parent);
  // Slots end at the longest sequence that the model takes.
  const std::int64_t num_slots =
      std::min(parent.progress.num_computed_tokens, options_.max_model_len);
  const std::int64_t num_copies = coordinator_->num_blocks_to_copy(parent_idx, num_slots);
  if (num_copies > block_pool().get_num_free_blocks()) return std::nullopt;

  std::vector<GroupBlockCopy> copies;
  copies.reserve(to_size(num_copies));
  const bool is_known = request_table_.find(child).valid();
  const RequestIdx child_idx = request_table_.find_or_add(child);
  try {
    coordinator_->fork(parent_idx, child_idx, num_slots, copies);
  } catch (...) {
    if (!is_known) request_table_.remove(child_idx);
    throw;
  }
  child.progress.num_computed_tokens = parent.progress.num_computed_tokens;
  return copies;
}

}  // namespace paged_kv
