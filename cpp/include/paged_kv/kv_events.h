// SPDX-License-Identifier: Apache-2.0
//
// What happened to the prefix cache, for those outside who keep track of it (routers, other tiers).
//
// Source: vLLM 0.32 distributed/kv_events.py.
#pragma once

#include "paged_kv/block_hash.h"
#include "paged_kv/ids.h"

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace paged_kv {

// Blocks of one group became findable, or were reused by a request that reports that too.
struct BlockStored {
  std::vector<BlockHash> block_hashes;
  std::optional<BlockHash> parent_block_hash;  // of the block before the first token
  std::vector<std::int32_t> token_ids;         // of the whole range, blocks left out included
  std::int64_t block_size = 0;                 // tokens per block
  std::optional<std::int64_t> lora_id;
  std::optional<std::string> lora_name;
  std::vector<std::optional<ExtraKeys>> extra_keys;  // one for each hash
  GroupId group_idx;
  std::optional<std::string> session_id;
  std::string kv_cache_spec_kind;
  std::optional<std::int64_t> kv_cache_spec_sliding_window;
};

// A block can no longer be found under this hash.
struct BlockRemoved {
  BlockHash block_hash;
  GroupId group_idx;
};

struct AllBlocksCleared {};

using KVCacheEvent = std::variant<BlockStored, BlockRemoved, AllBlocksCleared>;

// Events in the order in which they happened, until somebody takes them.
class KVEventQueue {
 public:
  template <class Event>
  void push(Event event) {
    events_.emplace_back(std::in_place_type<Event>, std::move(event));
  }
  [[nodiscard]] std::vector<KVCacheEvent> take() { return std::exchange(events_, {}); }

 private:
  std::vector<KVCacheEvent> events_;
};

}  // namespace paged_kv
