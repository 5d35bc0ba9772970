// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "paged_kv/block_hash.h"
#include "paged_kv/block_hash_map.h"
#include "paged_kv/evicted_keys.h"
#include "paged_kv/eviction_policy.h"
#include "paged_kv/free_queue.h"
#include "paged_kv/huge_pages.h"
#include "paged_kv/ids.h"
#include "paged_kv/kv_block.h"
#include "paged_kv/kv_cache_metrics.h"
#include "paged_kv/kv_events.h"
#include "paged_kv/prefix_contents.h"

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <vector>

namespace paged_kv {

// The whole state of a pool, for tests and debugging.
struct BlockPoolDump {
  std::vector<BlockId> free_order;                             // next to be handed out first
  std::map<BlockId, std::int32_t> ref_counts;                  // those that are not 0
  std::map<BlockHashWithGroupId, std::set<BlockId>> hash_map;  // key -> blocks
};

// Hands out blocks, counts who holds them, and remembers the content of full blocks so that a
// later request with the same prefix can share them.
//
// Life of a block: free -> get_new_blocks() -> held (ref_cnt 1) -> full: cache_full_blocks() names
// its content -> touch() shares it -> free_blocks() by every holder -> free again, its content
// still findable until get_new_blocks() reuses the block. Block 0 is the null block: it stands in
// tables where nothing is held, and takes no part in any of this; its ref_cnt stays 0.
//
// A call that throws changes nothing, also if it is for want of memory. Without caching
// (`enable_caching` false) no block ever has a hash: cache_full_blocks() does nothing and every
// lookup misses.
//
// Invariants, checked by check_integrity():
//   I1  blocks()[i].block_id == i, and block 0 alone is the null block;
//   I2  the free queue is well linked (Q1 .. Q3 of FreeKVCacheBlockQueue);
//   I3  a block is in the free queue exactly if its ref_cnt is 0 and it is not the null block;
//   I4  ref_cnt is never negative;
//   I5  the prefix-cache index is well formed (M1 .. M3 of BlockHashToBlockMap);
//   I6  the index holds (key, block) exactly if the block has that key: its own, or one of its
//       secondary keys, which name parts of it;
//       of a key that is_xxh3(), the pool holds the content;
//   I7  the null block has ref_cnt 0 and no hash; without caching no block has one.
//
// Cost: O(1) per block for every method, unless said otherwise. Nothing is allocated but results,
// events, what a metrics collector notes, and what cache_partial_block() adds.
// Thread rule: one owner thread.
// Source: vLLM 0.32 v1/core/block_pool.py::BlockPool.
class BlockPool {
 public:
  // `num_gpu_blocks` includes the null block. `hash_block_size` is the number of tokens that one
  // of a request's block hashes covers. With events, kv_events() reports what leaves the cache.
  // `eviction_policy` decides which free blocks are reused first; null: the least recently used.
  // Of the keys that leave the cache, the last `num_remembered_evictions` are told by
  // was_evicted(). `prefix_contents` are those of the requests whose hashes are XXH3's; without
  // them such hashes cannot be cached.
  BlockPool(std::int32_t num_gpu_blocks, bool enable_caching, std::int32_t hash_block_size,
            bool enable_kv_cache_events = false,
            std::shared_ptr<KVCacheMetricsCollector> metrics_collector = nullptr,
            std::shared_ptr<EvictionPolicy> eviction_policy = nullptr,
            std::int32_t num_remembered_evictions = 0,
            std::shared_ptr<PrefixContents> prefix_contents = nullptr);
  ~BlockPool() { release_contents(); }
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  [[nodiscard]] std::int32_t num_gpu_blocks() const noexcept {
    return static_cast<std::int32_t>(blocks_.size());
  }
  [[nodiscard]] bool enable_caching() const noexcept { return enable_caching_; }
  [[nodiscard]] std::int32_t hash_block_size() const noexcept { return hash_block_size_; }
  [[nodiscard]] std::span<const KVCacheBlock> blocks() const noexcept { return blocks_; }
  [[nodiscard]] const FreeKVCacheBlockQueue& free_block_queue() const noexcept {
    return free_block_queue_;
  }
  [[nodiscard]] const BlockHashToBlockMap& cached_block_hash_to_block() const noexcept {
    return cached_block_hash_to_block_;
  }

  // Whether the key left the cache lately, as far as the pool remembers; since the last reset.
  [[nodiscard]] bool was_evicted(const BlockHashWithGroupId& key) const {
    return evicted_keys_.contains(key);
  }

  // Null without events.
  [[nodiscard]] KVEventQueue* kv_events() noexcept { return kv_events_ ? &*kv_events_ : nullptr; }

  [[nodiscard]] std::int32_t get_num_free_blocks() const noexcept {
    return free_block_queue_.num_free_blocks();
  }
  // Share of the blocks, without the null block, that is held: 0.0 .. 1.0.
  [[nodiscard]] double get_usage() const noexcept;

  // Throws std::invalid_argument unless all are blocks of this pool.
  void check_ids(std::span<const BlockId> blocks) const;

  // Takes blocks from the front of the free queue. What they held leaves the prefix cache.
  // Throws OutOfBlocksError if fewer than `num_blocks` are free.
  [[nodiscard]] std::vector<BlockId> get_new_blocks(std::int64_t num_blocks);
  // Throws what get_new_blocks() would throw, and changes nothing.
  void check_get_new_blocks(std::int64_t num_blocks) const;
  // get_new_blocks() to the end of `blocks`: a request's table grows without a list in between.
  void append_new_blocks(std::int64_t num_blocks, std::vector<BlockId>& blocks);

  // One more holder for each block. A free one leaves the queue and keeps its content.
  void touch(std::span<const BlockId> blocks);

  // One holder less for each block, in the order in which they should be reused. Blocks that
  // nobody holds any more go to the front or the back of the queue: eviction_policy.h. Throws
  // std::invalid_argument if a block is freed more often than it is held.
  void free_blocks(std::span<const BlockId> ordered_blocks);

  // Makes blocks [num_cached_blocks, num_full_blocks) of a request findable. `blocks` are all
  // blocks of the request and `block_hashes` all its hashes, of hash_block_size() tokens each;
  // `block_size`, in tokens, may be a multiple of that. Null blocks are skipped, and so is each
  // block i of the range whose block_mask[i] is 0 (an empty mask skips none). A block that has this
  // key already stays as it is; the key of a part of the block (cache_partial_block) gives way to
  // that of the whole; another key, or a block that nobody holds, is refused.
  void cache_full_blocks(std::span<const BlockHash> block_hashes, std::span<const BlockId> blocks,
                         std::int64_t num_cached_blocks, std::int64_t num_full_blocks,
                         std::int64_t block_size, GroupId kv_cache_group_id,
                         std::span<const std::uint8_t> block_mask = {});

  // Makes the first tokens of a held block findable, up to the first `num_tokens` of the request, a
  // multiple of hash_block_size() that ends inside the block. A block whose content is named
  // already gets a secondary key, which leaves the index with the first. True if the key is new.
  // Nothing happens to the null block, or without caching.
  bool cache_partial_block(std::span<const BlockHash> block_hashes, BlockId block,
                           std::int64_t num_tokens, GroupId kv_cache_group_id);

  // Whether every group has a cached block of this content; if so, block_ids[i] becomes that of
  // kv_cache_group_ids[i]. Does not touch them, and does not allocate.
  [[nodiscard]] bool find_cached_blocks(const BlockHash& block_hash,
                                        std::span<const GroupId> kv_cache_group_ids,
                                        std::span<BlockId> block_ids) const;

  // The cached block of each group, or nullopt unless every group has one. Does not touch them.
  [[nodiscard]] std::optional<std::vector<BlockId>> get_cached_block(
      const BlockHash& block_hash, std::span<const GroupId> kv_cache_group_ids) const;

  // The cached blocks of a prefix: from the left up to the first miss, at most `max_num_blocks`.
  // Does not touch them, so touch() must come before the next get_new_blocks().
  [[nodiscard]] std::vector<BlockId> find_cached_prefix(std::span<const BlockHash> block_hashes,
                                                        std::int64_t max_num_blocks,
                                                        std::int64_t block_size,
                                                        GroupId kv_cache_group_id) const;

  // Removes blocks from the prefix cache. Who holds them keeps them; free ones keep their place in
  // the queue. Blocks without a hash are left alone.
  void evict_blocks(std::span<const BlockId> blocks);

  // Empties the prefix cache, e.g. after a change of weights. False, and no change, while a block
  // is held. The order of the free queue stays. O(num_gpu_blocks).
  [[nodiscard]] bool reset_prefix_cache();

  // O(num_gpu_blocks log num_gpu_blocks).
  [[nodiscard]] BlockPoolDump dump() const;

  // Throws InvariantError if I1 .. I7 do not hold. O(num_gpu_blocks).
  void check_integrity() const;

 private:
  [[nodiscard]] KVCacheBlock& at(BlockId block) noexcept { return blocks_[block.index()]; }
  struct NewKey {
    BlockHashWithGroupId key;
    std::int32_t num_tokens;
  };

  template <class Place>
  void choose_places(Place place);
  void check_can_be_cached(const KVCacheBlock& block, const NewKey& key,
                           std::int64_t block_size) const;
  void check_content(const BlockHash& hash) const;
  void release_contents() noexcept;
  void insert_key(KVCacheBlock& block, const NewKey& key);
  void add_secondary_key(KVCacheBlock& block, const BlockHashWithGroupId& key);
  void remove_from_index(const BlockHashWithGroupId& key, BlockId block) noexcept;
  void remove_from_cache(KVCacheBlock& block) noexcept;
  void remove_key(const KVCacheBlock& block, const BlockHashWithGroupId& key) noexcept;

  HugePageVector<KVCacheBlock> blocks_;
  FreeKVCacheBlockQueue free_block_queue_;
  BlockHashToBlockMap cached_block_hash_to_block_;
  // Of the blocks with has_secondary_keys, in the order in which they came.
  std::unordered_map<BlockId, std::vector<BlockHashWithGroupId>> secondary_keys_;
  std::size_t num_secondary_keys_ = 0;
  std::optional<KVEventQueue> kv_events_;
  std::shared_ptr<KVCacheMetricsCollector> metrics_collector_;
  std::shared_ptr<EvictionPolicy> eviction_policy_;
  EvictedKeys evicted_keys_;
  std::shared_ptr<PrefixContents> prefix_contents_;
  std::int64_t num_held_contents_ = 0;  // keys in the index that are XXH3's
  bool enable_caching_;
  std::int32_t hash_block_size_;
  // Have room for all blocks, so that neither free_blocks() nor cache_full_blocks() allocates.
  std::vector<BlockId> to_front_;
  std::vector<BlockId> to_back_;
};

}  // namespace paged_kv
