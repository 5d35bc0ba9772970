// SPDX-License-Identifier: Apache-2.0
//
// A pool looked at from the outside, for tests and debugging.
#include "paged_kv/block_pool.h"
#include "paged_kv/check.h"

#include <set>
#include <vector>

namespace paged_kv {

BlockPoolDump BlockPool::dump() const {
  BlockPoolDump dump;
  dump.free_order = free_block_queue_.get_all_free_blocks();
  for (const KVCacheBlock& block : blocks_) {
    if (block.ref_cnt != 0) dump.ref_counts.emplace(block.block_id, block.ref_cnt);
  }
  for (const BlockHashWithGroupId& key : cached_block_hash_to_block_.get_all_keys()) {
    const std::vector<BlockId> blocks = cached_block_hash_to_block_.get_all_blocks(key);
    dump.hash_map.emplace(key, std::set<BlockId>(blocks.begin(), blocks.end()));
  }
  return dump;
}

void BlockPool::check_integrity() const {
  free_block_queue_.check_integrity();            // I2
  cached_block_hash_to_block_.check_integrity();  // I5
  std::size_t num_keys = 0;
  std::int64_t num_contents = 0;
  const auto check_key_content = [&](const BlockHashWithGroupId& key) {
    if (!key.hash.is_xxh3()) return;
    ++num_contents;
    PAGED_KV_CHECK_AS(InvariantError, prefix_contents_->contains(key.hash.content()),
                      "I6: a block has a key whose content is not kept");
  };
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    const KVCacheBlock& block = blocks_[i];
    PAGED_KV_CHECK_AS(InvariantError, block.block_id.index() == i && block.is_null == (i == 0),
                      "I1: block ", i, " has id ", block.block_id, ", is_null ", block.is_null);
    PAGED_KV_CHECK_AS(InvariantError, block.in_free_queue == (block.ref_cnt == 0 && !block.is_null),
                      "I3: block ", i, " has ref_cnt ", block.ref_cnt, ", in_free_queue ",
                      block.in_free_queue);
    PAGED_KV_CHECK_AS(InvariantError, block.ref_cnt >= 0, "I4: block ", i, " has ref_cnt ",
                      block.ref_cnt);
    PAGED_KV_CHECK_AS(InvariantError, !block.is_null || (block.ref_cnt == 0 && !block.is_hashed()),
                      "I7: the null block has ref_cnt ", block.ref_cnt);
    PAGED_KV_CHECK_AS(InvariantError, !block.has_secondary_keys || block.is_hashed(), "I6: block ",
                      i, " has secondary keys only");
    if (!block.is_hashed()) continue;
    ++num_keys;
    check_key_content(block.key);
    PAGED_KV_CHECK_AS(InvariantError, enable_caching_, "I7: block ", i,
                      " has a hash, but caching is off");
    PAGED_KV_CHECK_AS(InvariantError,
                      cached_block_hash_to_block_.contain(block.key, block.block_id), "I6: block ",
                      i, " has a key that the index does not have");
  }
  for (const auto& [block_id, keys] : secondary_keys_) {
    num_keys += keys.size();
    PAGED_KV_CHECK_AS(InvariantError, blocks_[block_id.index()].has_secondary_keys && !keys.empty(),
                      "I6: block ", block_id, " does not know of its secondary keys");
    for (const BlockHashWithGroupId& key : keys) {
      check_key_content(key);
      PAGED_KV_CHECK_AS(InvariantError, cached_block_hash_to_block_.contain(key, block_id),
                        "I6: block ", block_id, " has a key that the index does not have");
    }
  }
  PAGED_KV_CHECK_AS(InvariantError, num_contents == num_held_contents_, "I6: ", num_contents,
                    " keys are XXH3's, ", num_held_contents_, " contents are held");
  PAGED_KV_CHECK_AS(InvariantError, num_keys == cached_block_hash_to_block_.num_entries(),
                    "I6: ", num_keys, " keys lead to blocks, the index has ",
                    cached_block_hash_to_block_.num_entries(), " entries");
}

}  // namespace paged_kv
