// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/managers/single_type.h"

#include "paged_kv/check.h"
#include "paged_kv/make_room.h"
#include "paged_kv/math.h"
#include "paged_kv/stored_event.h"

#include <algorithm>
#include <utility>

namespace paged_kv {
namespace {

// Drops the first n, or all if there are fewer.
std::span<const BlockId> without_first(std::span<const BlockId> blocks, std::int64_t n) {
  return blocks.subspan(std::min(to_size(n), blocks.size()));
}

}  // namespace

SingleTypeKVCacheManager::SingleTypeKVCacheManager(KVCacheSpecPtr kv_cache_spec,
                                                   BlockPool& block_pool, GroupId kv_cache_group_id,
                                                   const RequestLimits& limits)
    : kv_cache_spec_(std::move(kv_cache_spec)),
      block_pool_(block_pool),
      kv_cache_group_id_(kv_cache_group_id),
      block_size_(kv_cache_spec_->block_size()),
      recycles_blocks_(kv_cache_spec_->recycles_blocks()) {
  if (recycles_blocks_) {
    max_admission_blocks_ = kv_cache_spec_->max_num_blocks_per_request(limits);
  }
}

SingleTypeKVCacheManager::Row& SingleTypeKVCacheManager::row(RequestIdx request_idx) {
  if (request_idx.index() >= rows_.size()) rows_.resize(request_idx.index() + 1);
  return rows_[request_idx.index()];
}

void SingleTypeKVCacheManager::reserve(const SlotDemand& demand) {
  Row& held = row(demand.request_idx);
  const auto has_room = [&] {
    const auto capacity = static_cast<std::int64_t>(held.blocks.capacity());
    return !demand.adopts_computed_tokens && capacity * block_size_ >= demand.num_tokens &&
           (!recycles_blocks_ || mask_.capacity() >= held.blocks.capacity());
  };
  if (has_room()) return;
  // More than the pool has blocks for is refused before it is written down.
  std::int64_t num_blocks = std::ssize(held.blocks);
  if (demand.adopts_computed_tokens) {
    num_blocks = std::max(num_skipped_blocks(demand.total_computed_tokens),
                          std::ssize(demand.new_computed_blocks));
  }
  num_blocks +=
      std::min(std::max(ceil_div(demand.num_tokens, block_size_) - num_blocks, std::int64_t{0}),
               std::int64_t{block_pool_.num_gpu_blocks()});
  make_room(held.blocks, to_size(num_blocks));
  if (recycles_blocks_) make_room(mask_, held.blocks.capacity());
}

std::int64_t SingleTypeKVCacheManager::get_num_blocks_to_allocate(const SlotDemand& demand) const {
  std::int64_t num_required_blocks = ceil_div(demand.num_tokens, block_size_);
  if (demand.apply_admission_cap && max_admission_blocks_) {
    num_required_blocks = std::min(num_required_blocks, *max_admission_blocks_);
  }
  if (!demand.adopts_computed_tokens) {
    // Drafts that were rejected may have left the request with more blocks than it needs.
    const std::int64_t num_held = std::ssize(blocks(demand.request_idx));
    return std::max(num_required_blocks - num_held, std::int64_t{0});
  }
  const std::int64_t num_skipped = num_skipped_blocks(demand.total_computed_tokens);
  const std::int64_t num_covered = std::max(num_skipped, std::ssize(demand.new_computed_blocks));
  std::int64_t num_blocks = std::max(num_required_blocks - num_covered, std::int64_t{0});
  // Hits that nobody holds leave the free queue too, when they are taken over.
  const auto all_blocks = block_pool_.blocks();
  for (const BlockId id : without_first(demand.new_computed_blocks, num_skipped)) {
    const KVCacheBlock& block = all_blocks[id.index()];
    if (block.ref_cnt == 0 && !block.is_null) ++num_blocks;
  }
  return num_blocks;
}

void SingleTypeKVCacheManager::add_local_computed_blocks(RequestIdx request_idx,
                                                         std::span<const BlockId> blocks,
                                                         std::int64_t total_computed_tokens) {
  const std::int64_t num_skipped = num_skipped_blocks(total_computed_tokens);
  const auto adopted = without_first(blocks, num_skipped);
  block_pool_.touch(adopted);
  Row& request = row(request_idx);
  request.blocks.assign(to_size(num_skipped), kNullBlockId);
  request.blocks.insert(request.blocks.end(), adopted.begin(), adopted.end());
  request.num_cached_blocks = std::ssize(request.blocks);
  request.num_skipped_blocks = num_skipped;
}

void SingleTypeKVCacheManager::allocate_external_computed_blocks(
    RequestIdx request_idx, std::int64_t total_computed_tokens,
    std::int64_t num_external_computed_tokens) {
  const std::int64_t num_needed_tokens =
      total_computed_tokens - get_num_skipped_tokens(total_computed_tokens);
  if (std::min(num_needed_tokens, num_external_computed_tokens) <= 0) return;
  allocate_new_blocks(request_idx, total_computed_tokens);
}

std::int64_t SingleTypeKVCacheManager::allocate_new_blocks(RequestIdx request_idx,
                                                           std::int64_t num_tokens) {
  std::vector<BlockId>& blocks = row(request_idx).blocks;
  const std::int64_t num_new_blocks = ceil_div(num_tokens, block_size_) - std::ssize(blocks);
  if (num_new_blocks <= 0) return 0;
  block_pool_.append_new_blocks(num_new_blocks, blocks);
  return num_new_blocks;
}

void SingleTypeKVCacheManager::cache_blocks(const Request& request, RequestIdx request_idx,
                                            std::int64_t num_tokens) {
  Row& held = row(request_idx);
  const std::int64_t num_cached_blocks = std::max(held.num_cached_blocks, std::int64_t{0});
  // Slots end at the longest sequence that the model takes, tokens may go on.
  const std::int64_t num_full_blocks = std::min(num_tokens / block_size_, std::ssize(held.blocks));
  if (num_cached_blocks >= num_full_blocks) return;

  const auto mask = reachable_block_mask(request, num_cached_blocks, num_full_blocks, mask_);
  block_pool_.cache_full_blocks(request.block_hashes(), held.blocks, num_cached_blocks,
                                num_full_blocks, block_size_, kv_cache_group_id_, mask);
  held.num_cached_blocks = num_full_blocks;
  KVEventQueue* events = block_pool_.kv_events();
  if (events == nullptr) return;
  events->push_made([&] {
    std::vector<std::uint8_t> is_left_out(to_size(num_full_blocks - num_cached_blocks));
    for (std::size_t i = 0; i < is_left_out.size(); ++i) {
      const BlockId block = held.blocks[to_size(num_cached_blocks) + i];
      is_left_out[i] = block == kNullBlockId || (!mask.empty() && mask[i] == 0) ? 1 : 0;
    }
    return make_block_stored_event(request,
                                   {.hash_block_size = block_pool_.hash_block_size(),
                                    .block_size = block_size_,
                                    .start_block = num_cached_blocks,
                                    .end_block = num_full_blocks,
                                    .kv_cache_group_id = kv_cache_group_id_},
                                   is_left_out);
  });
}

std::span<const std::uint8_t> SingleTypeKVCacheManager::reachable_block_mask(
    const Request& /*request*/, std::int64_t /*start_block*/, std::int64_t /*end_block*/,
    std::vector<std::uint8_t>& /*mask*/) {
  return {};
}

void SingleTypeKVCacheManager::remove_skipped_blocks(RequestIdx request_idx,
                                                     std::int64_t num_computed_tokens) {
  if (!recycles_blocks_ || !has_row(request_idx)) return;
  Row& request = rows_[request_idx.index()];
  const std::int64_t num_skipped =
      std::min(num_skipped_blocks(num_computed_tokens), std::ssize(request.blocks));
  if (num_skipped <= request.num_skipped_blocks) return;
  // In place, so that nothing is allocated. Null blocks of a hit among them count for nothing.
  const auto freed = std::span(request.blocks)
                         .first(to_size(num_skipped))
                         .subspan(to_size(request.num_skipped_blocks));
  std::ranges::reverse(freed);  // the last is given back first
  block_pool_.free_blocks(freed);
  std::ranges::fill(freed, kNullBlockId);
  request.num_skipped_blocks = num_skipped;
}

void SingleTypeKVCacheManager::pop_blocks_for_free(RequestIdx request_idx,
                                                   std::vector<BlockId>& blocks) {
  if (!has_row(request_idx)) return;
  Row& request = rows_[request_idx.index()];
  blocks.insert(blocks.end(), request.blocks.begin(), request.blocks.end());
  request.clear();
}

void SingleTypeKVCacheManager::free(RequestIdx request_idx) {
  if (!has_row(request_idx)) return;
  Row& request = rows_[request_idx.index()];
  std::ranges::reverse(request.blocks);
  block_pool_.free_blocks(request.blocks);
  request.clear();
}

void SingleTypeKVCacheManager::check_integrity() const {
  const auto all_blocks = block_pool_.blocks();
  for (const Row& request : rows_) {
    for (const BlockId id : request.blocks) {
      PAGED_KV_CHECK_AS(InvariantError, id == kNullBlockId || all_blocks[id.index()].ref_cnt > 0,
                        "G1: group ", kv_cache_group_id_, ": block ", id,
                        " is in a table, but nobody holds it");
    }
    PAGED_KV_CHECK_AS(InvariantError, request.num_cached_blocks <= std::ssize(request.blocks),
                      "G2: group ", kv_cache_group_id_, ": ", request.num_cached_blocks,
                      " cached blocks of ", request.blocks.size());
    const std::int64_t num_skipped = request.num_skipped_blocks;
    PAGED_KV_CHECK_AS(InvariantError,
                      num_skipped <= std::ssize(request.blocks) &&
                          std::ranges::all_of(std::span(request.blocks).first(to_size(num_skipped)),
                                              [](BlockId id) { return id == kNullBlockId; }),
                      "G3: group ", kv_cache_group_id_, ": not all of the first ", num_skipped,
                      " blocks are null");
  }
}

}  // namespace paged_kv
