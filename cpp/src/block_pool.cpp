// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/block_pool.h"

#include "paged_kv/check.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace paged_kv {
namespace {

// Block 0 is the null block: marked as such, so that it is left out of the queue.
HugePageVector<KVCacheBlock> make_blocks(std::int32_t num_blocks) {
  PAGED_KV_CHECK(num_blocks > 0, "num_gpu_blocks must be positive, got ", num_blocks);
  HugePageVector<KVCacheBlock> blocks;
  blocks.reserve(static_cast<std::size_t>(num_blocks));
  for (std::int32_t i = 0; i < num_blocks; ++i) blocks.emplace_back().block_id = BlockId(i);
  blocks[kNullBlockId.index()].is_null = true;
  return blocks;
}

}  // namespace

BlockPool::BlockPool(std::int32_t num_gpu_blocks, bool enable_caching, std::int32_t hash_block_size,
                     bool enable_kv_cache_events,
                     std::shared_ptr<KVCacheMetricsCollector> metrics_collector,
                     std::shared_ptr<EvictionPolicy> eviction_policy,
                     std::int32_t num_remembered_evictions,
                     std::shared_ptr<PrefixContents> prefix_contents)
    : blocks_(make_blocks(num_gpu_blocks)),
      free_block_queue_(blocks_),
      metrics_collector_(std::move(metrics_collector)),
      eviction_policy_(std::move(eviction_policy)),
      evicted_keys_(num_remembered_evictions),
      prefix_contents_(std::move(prefix_contents)),
      enable_caching_(enable_caching),
      hash_block_size_(hash_block_size) {
  if (enable_kv_cache_events) kv_events_.emplace();
  PAGED_KV_CHECK(hash_block_size > 0, "hash_block_size must be positive, got ", hash_block_size);
  free_block_queue_.remove(kNullBlockId);
  // Neither freeing nor caching a block must fail half-way for want of memory.
  to_front_.reserve(blocks_.size());
  to_back_.reserve(blocks_.size());
  if (enable_caching) cached_block_hash_to_block_.reserve(blocks_.size());
}

double BlockPool::get_usage() const noexcept {
  const std::int32_t num_usable_blocks = num_gpu_blocks() - 1;
  if (num_usable_blocks == 0) return 0.0;
  return 1.0 - static_cast<double>(get_num_free_blocks()) / num_usable_blocks;
}

std::vector<BlockId> BlockPool::get_new_blocks(std::int64_t num_blocks) {
  std::vector<BlockId> new_blocks;
  append_new_blocks(num_blocks, new_blocks);
  return new_blocks;
}

void BlockPool::check_get_new_blocks(std::int64_t num_blocks) const {
  PAGED_KV_CHECK(num_blocks >= 0, "num_blocks must not be negative, got ", num_blocks);
  PAGED_KV_CHECK_AS(OutOfBlocksError, num_blocks <= get_num_free_blocks(), "Cannot get ",
                    num_blocks, " free blocks from the pool: ", get_num_free_blocks(), " of ",
                    num_gpu_blocks() - 1, " are free");
}

void BlockPool::append_new_blocks(std::int64_t num_blocks, std::vector<BlockId>& blocks) {
  check_get_new_blocks(num_blocks);
  const std::size_t num_before = blocks.size();
  blocks.resize(num_before + static_cast<std::size_t>(num_blocks));
  const auto new_blocks = std::span(blocks).subspan(num_before);
  free_block_queue_.popleft_n(new_blocks);
  for (const BlockId id : new_blocks) {
    KVCacheBlock& block = at(id);
    if (metrics_collector_ && enable_caching_) metrics_collector_->on_block_evicted(id);
    remove_from_cache(block);
    block.ref_cnt = 1;
    block.num_hits = 0;
    if (metrics_collector_) metrics_collector_->on_block_allocated(id);
  }
}

void BlockPool::touch(std::span<const BlockId> blocks) {
  check_ids(blocks);
  for (const BlockId id : blocks) {
    KVCacheBlock& block = at(id);
    if (block.is_null) continue;
    if (block.ref_cnt == 0) free_block_queue_.remove(id);
    ++block.ref_cnt;
    if (block.num_hits < std::numeric_limits<std::uint16_t>::max()) ++block.num_hits;
    if (metrics_collector_) metrics_collector_->on_block_accessed(id);
  }
}

void BlockPool::free_blocks(std::span<const BlockId> ordered_blocks) {
  check_ids(ordered_blocks);
  to_front_.clear();
  to_back_.clear();
  for (std::size_t i = 0; i < ordered_blocks.size(); ++i) {
    KVCacheBlock& block = at(ordered_blocks[i]);
    if (block.is_null) continue;
    if (block.ref_cnt == 0) {
      for (const BlockId freed : ordered_blocks.first(i)) {
        if (freed != kNullBlockId) ++at(freed).ref_cnt;
      }
      PAGED_KV_CHECK(false, "block ", block.block_id, " is freed more often than it is held");
    }
    if (--block.ref_cnt == 0) to_back_.push_back(block.block_id);
  }
  // Only now, so that a policy is not asked by a call that fails.
  if (eviction_policy_) {
    choose_places([this](const KVCacheBlock& block) { return eviction_policy_->place(block); });
  } else {
    choose_places([](const KVCacheBlock& block) { return lru_place(block); });
  }
  free_block_queue_.prepend_n(to_front_);
  free_block_queue_.append_n(to_back_);
}

// Moves blocks from to_back_ to to_front_. A template, so that a pool without a policy pays one
// branch a call for the choice.
template <class Place>
void BlockPool::choose_places(Place place) {
  std::size_t num_to_back = 0;
  for (const BlockId id : to_back_) {
    if (place(at(id)) == FreePlace::kFront) {
      to_front_.push_back(id);
    } else {
      to_back_[num_to_back++] = id;
    }
  }
  to_back_.resize(num_to_back);
}

void BlockPool::cache_full_blocks(std::span<const BlockHash> block_hashes,
                                  std::span<const BlockId> blocks, std::int64_t num_cached_blocks,
                                  std::int64_t num_full_blocks, std::int64_t block_size,
                                  GroupId kv_cache_group_id,
                                  std::span<const std::uint8_t> block_mask) {
  PAGED_KV_CHECK(num_cached_blocks >= 0, "num_cached_blocks must not be negative, got ",
                 num_cached_blocks);
  PAGED_KV_CHECK(kv_cache_group_id.valid(), "kv_cache_group_id must not be negative, got ",
                 kv_cache_group_id);
  const CoarseBlockHashes hashes(block_hashes, hash_block_size_, block_size);
  if (num_cached_blocks >= num_full_blocks || !enable_caching_) return;

  PAGED_KV_CHECK(num_full_blocks <= static_cast<std::int64_t>(blocks.size()), "num_full_blocks is ",
                 num_full_blocks, ", but there are ", blocks.size(), " blocks");
  PAGED_KV_CHECK(num_full_blocks <= hashes.size(), "num_full_blocks is ", num_full_blocks,
                 ", but the request has hashes for ", hashes.size(), " blocks");
  PAGED_KV_CHECK(num_full_blocks <= std::numeric_limits<std::int32_t>::max() / block_size,
                 "a prefix of ", num_full_blocks, " blocks of ", block_size, " tokens is too long");
  const auto num_new_blocks = static_cast<std::size_t>(num_full_blocks - num_cached_blocks);
  PAGED_KV_CHECK(block_mask.empty() || block_mask.size() == num_new_blocks,
                 "block_mask must have one entry for each of the ", num_new_blocks,
                 " blocks to cache, got ", block_mask.size());
  const auto new_blocks =
      blocks.subspan(static_cast<std::size_t>(num_cached_blocks), num_new_blocks);
  check_ids(new_blocks);

  const auto is_skipped = [&](std::size_t i) {
    return new_blocks[i] == kNullBlockId || (!block_mask.empty() && block_mask[i] == 0);
  };
  const auto key_of = [&](std::size_t i) {
    const std::int64_t block_idx = num_cached_blocks + static_cast<std::int64_t>(i);
    return NewKey{{hashes[block_idx], kv_cache_group_id},
                  static_cast<std::int32_t>((block_idx + 1) * block_size)};
  };
  for (std::size_t i = 0; i < num_new_blocks; ++i) {
    if (!is_skipped(i)) check_can_be_cached(at(new_blocks[i]), key_of(i), block_size);
  }

  std::vector<BlockId>& newly_cached = to_back_;
  newly_cached.clear();
  for (std::size_t i = 0; i < num_new_blocks; ++i) {
    if (is_skipped(i)) continue;
    KVCacheBlock& block = at(new_blocks[i]);
    const NewKey key = key_of(i);
    if (block.is_hashed() && block.key == key.key) continue;
    if (block.is_hashed() && block.block_hash_num_tokens % block_size == 0) {
      // The range names the block twice.
      for (const BlockId id : newly_cached) {
        remove_from_index(at(id).key, id);
        at(id).reset_hash();
      }
      PAGED_KV_CHECK(false, "cannot cache block ", block.block_id,
                     ": it is cached as another content already");
    }
    remove_from_cache(block);
    insert_key(block, key);
    newly_cached.push_back(block.block_id);
  }
}

void BlockPool::check_can_be_cached(const KVCacheBlock& block, const NewKey& key,
                                    std::int64_t block_size) const {
  if (block.is_hashed() && block.key == key.key) return;
  check_content(key.key.hash);
  PAGED_KV_CHECK(block.ref_cnt > 0, "cannot cache block ", block.block_id, ": nobody holds it");
  if (!block.is_hashed()) return;
  const bool is_part =
      block.block_hash_num_tokens < key.num_tokens && block.block_hash_num_tokens % block_size != 0;
  PAGED_KV_CHECK(is_part, "cannot cache block ", block.block_id,
                 ": it is cached as another content already");
}

void BlockPool::check_content(const BlockHash& hash) const {
  if (!hash.is_xxh3()) return;
  PAGED_KV_CHECK(prefix_contents_ != nullptr && prefix_contents_->contains(hash.content()),
                 "an XXH3 block hash can only be cached as one of the block_hashes of a living "
                 "Request, which keeps the tokens that it stands for");
}

void BlockPool::insert_key(KVCacheBlock& block, const NewKey& key) {
  if (block.is_hashed()) {
    add_secondary_key(block, key.key);
  } else {
    block.key = key.key;
    block.block_hash_num_tokens = key.num_tokens;
  }
  cached_block_hash_to_block_.insert(key.key, block.block_id);
  if (key.key.hash.is_xxh3()) {
    prefix_contents_->retain(key.key.hash.content());
    ++num_held_contents_;
  }
}

// Keeps room in the index for a first key of every block, so that only this needs memory.
void BlockPool::add_secondary_key(KVCacheBlock& block, const BlockHashWithGroupId& key) {
  cached_block_hash_to_block_.reserve(blocks_.size() + num_secondary_keys_ + 1);
  if (block.has_secondary_keys) {
    secondary_keys_.at(block.block_id).push_back(key);
  } else {
    secondary_keys_.emplace(block.block_id, std::vector{key});
  }
  block.has_secondary_keys = true;
  ++num_secondary_keys_;
}

void BlockPool::remove_from_index(const BlockHashWithGroupId& key, BlockId block) noexcept {
  cached_block_hash_to_block_.pop(key, block);
  if (!key.hash.is_xxh3()) return;
  prefix_contents_->release(key.hash.content());
  --num_held_contents_;
}

void BlockPool::release_contents() noexcept {
  if (num_held_contents_ == 0) return;
  const auto release = [this](const BlockHashWithGroupId& key) {
    if (key.hash.is_xxh3()) prefix_contents_->release(key.hash.content());
  };
  for (const KVCacheBlock& block : blocks_) {
    if (block.is_hashed()) release(block.key);
  }
  for (const auto& [block_id, keys] : secondary_keys_) std::ranges::for_each(keys, release);
  num_held_contents_ = 0;
}

bool BlockPool::cache_partial_block(std::span<const BlockHash> block_hashes, BlockId block_id,
                                    std::int64_t num_tokens, GroupId kv_cache_group_id) {
  check_ids({&block_id, 1});
  PAGED_KV_CHECK(kv_cache_group_id.valid(), "kv_cache_group_id must not be negative, got ",
                 kv_cache_group_id);
  PAGED_KV_CHECK(num_tokens > 0 && num_tokens % hash_block_size_ == 0 &&
                     num_tokens / hash_block_size_ <= std::ssize(block_hashes),
                 "num_tokens must be a positive multiple of ", hash_block_size_, " within the ",
                 block_hashes.size(), " block hashes, got ", num_tokens);
  KVCacheBlock& block = at(block_id);
  if (block.is_null || !enable_caching_) return false;
  PAGED_KV_CHECK(block.ref_cnt > 0, "cannot cache block ", block_id, ": nobody holds it");
  check_content(block_hashes[static_cast<std::size_t>(num_tokens / hash_block_size_ - 1)]);

  const NewKey key{{block_hashes[static_cast<std::size_t>(num_tokens / hash_block_size_ - 1)],
                    kv_cache_group_id},
                   static_cast<std::int32_t>(num_tokens)};
  if (cached_block_hash_to_block_.contain(key.key, block_id)) return false;
  if (block.is_hashed() && block.block_hash_num_tokens < key.num_tokens) remove_from_cache(block);
  insert_key(block, key);
  return true;
}

bool BlockPool::find_cached_blocks(const BlockHash& block_hash,
                                   std::span<const GroupId> kv_cache_group_ids,
                                   std::span<BlockId> block_ids) const {
  for (std::size_t i = 0; i < kv_cache_group_ids.size(); ++i) {
    const auto block =
        cached_block_hash_to_block_.get_one_block({block_hash, kv_cache_group_ids[i]});
    if (!block) return false;
    block_ids[i] = *block;
  }
  return true;
}

std::optional<std::vector<BlockId>> BlockPool::get_cached_block(
    const BlockHash& block_hash, std::span<const GroupId> kv_cache_group_ids) const {
  std::vector<BlockId> cached_blocks(kv_cache_group_ids.size());
  if (!find_cached_blocks(block_hash, kv_cache_group_ids, cached_blocks)) return std::nullopt;
  return cached_blocks;
}

std::vector<BlockId> BlockPool::find_cached_prefix(std::span<const BlockHash> block_hashes,
                                                   std::int64_t max_num_blocks,
                                                   std::int64_t block_size,
                                                   GroupId kv_cache_group_id) const {
  const CoarseBlockHashes hashes(block_hashes, hash_block_size_, block_size);
  const std::int64_t limit = std::min(max_num_blocks, hashes.size());
  std::vector<BlockId> cached_blocks;
  for (std::int64_t i = 0; i < limit; ++i) {
    const auto block = cached_block_hash_to_block_.get_one_block({hashes[i], kv_cache_group_id});
    if (!block) break;
    cached_blocks.push_back(*block);
  }
  return cached_blocks;
}

void BlockPool::evict_blocks(std::span<const BlockId> blocks) {
  check_ids(blocks);
  for (const BlockId id : blocks) {
    if (metrics_collector_) metrics_collector_->on_block_evicted(id);
    remove_from_cache(at(id));
  }
}

bool BlockPool::reset_prefix_cache() {
  if (get_num_free_blocks() != num_gpu_blocks() - 1) return false;
  release_contents();
  cached_block_hash_to_block_.clear();
  secondary_keys_.clear();
  num_secondary_keys_ = 0;
  evicted_keys_.clear();
  for (KVCacheBlock& block : blocks_) block.reset_hash();
  if (metrics_collector_) metrics_collector_->reset();
  if (kv_events_) kv_events_->push(AllBlocksCleared{});
  return true;
}

void BlockPool::check_ids(std::span<const BlockId> blocks) const {
  for (const BlockId id : blocks) {
    PAGED_KV_CHECK(id.valid() && id.index() < blocks_.size(), "block id must be in [0, ",
                   blocks_.size(), "), got ", id);
  }
}

void BlockPool::remove_from_cache(KVCacheBlock& block) noexcept {
  if (!block.is_hashed()) return;
  remove_key(block, block.key);
  if (block.has_secondary_keys) {
    const auto keys = secondary_keys_.extract(block.block_id);
    for (const BlockHashWithGroupId& key : keys.mapped()) remove_key(block, key);
    num_secondary_keys_ -= keys.mapped().size();
  }
  block.reset_hash();
}

void BlockPool::remove_key(const KVCacheBlock& block, const BlockHashWithGroupId& key) noexcept {
  remove_from_index(key, block.block_id);
  evicted_keys_.push(key);
  if (kv_events_) kv_events_->push(BlockRemoved{key.hash, key.group_id});
}

}  // namespace paged_kv
