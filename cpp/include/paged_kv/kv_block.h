// SPDX-License-Identifier: Apache-2.0
//
// Metadata of one block of the KV cache: an id, counters and links, never memory of the cache.
//
// Source: vLLM 0.32 v1/core/kv_cache_utils.py::KVCacheBlock.
#pragma once

#include "paged_kv/block_hash.h"
#include "paged_kv/ids.h"

#include <cstdint>
#include <type_traits>

namespace paged_kv {

// One cache line. Blocks live in one vector; links are positions in it, so there are no pointers
// to follow, nothing to own and nothing to destroy. In a pool the position is the block id.
struct alignas(64) KVCacheBlock {
  // The key under which the prefix cache knows the block; means something only if is_hashed().
  BlockHashWithGroupId key;
  // Tokens of the prefix that `key` names, from the first token of the request on.
  std::int32_t block_hash_num_tokens = 0;
  BlockId block_id;
  // Holders of the block. 0 in a pool: the block is free, and in the free queue.
  std::int32_t ref_cnt = 0;
  // Neighbours in the free queue, -1 at its ends. Only FreeKVCacheBlockQueue writes these three.
  BlockId prev_free_block;
  BlockId next_free_block;
  // How often the block was found in the prefix cache since it was last handed out; stays at the
  // largest value. For eviction policies.
  std::uint16_t num_hits = 0;
  bool in_free_queue = false;
  // More keys lead to the block: the pool keeps them. Only with is_hashed().
  bool has_secondary_keys = false;
  // The pool's block 0: a filler in tables that holds no tokens, is never handed out or cached.
  bool is_null = false;

  [[nodiscard]] bool is_hashed() const noexcept { return key.group_id.valid(); }
  void reset_hash() noexcept {
    key = {};
    block_hash_num_tokens = 0;
    has_secondary_keys = false;
  }
};

static_assert(sizeof(KVCacheBlock) == 64);
static_assert(std::is_trivially_copyable_v<KVCacheBlock>);

}  // namespace paged_kv
