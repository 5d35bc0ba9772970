// SPDX-License-Identifier: Apache-2.0
//
// What happened to the prefix cache, for those outside who keep track of it (routers, other tiers).
//
// Source: vLLM 0.32 distributed/kv_events.py.
#pragma once

#include "paged_kv/block_hash.h"
#include "paged_kv/ids.h"

#include <cstdint>
#include <new>
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
//
// What happens to the cache must not fail because nobody can be told of it. So where memory for an
// event is wanting, all events up to it give way to one AllBlocksCleared: who follows them knows of
// fewer blocks than are cached then, but never of one that is not.
class KVEventQueue {
 public:
  // `make()` returns the event; it may throw std::bad_alloc.
  template <class Make>
  void push_made(Make make) noexcept {
    try {
      events_.emplace_back(make());
    } catch (const std::bad_alloc&) {
      events_.clear();
      is_incomplete_ = true;
    }
  }
  template <class Event>
  void push(const Event& event) noexcept {
    push_made([&] { return event; });
  }

  // Changes nothing if memory is wanting.
  [[nodiscard]] std::vector<KVCacheEvent> take() {
    if (!is_incomplete_) return std::exchange(events_, {});
    std::vector<KVCacheEvent> taken;
    taken.reserve(events_.size() + 1);
    taken.emplace_back(AllBlocksCleared{});
    for (KVCacheEvent& event : events_) taken.push_back(std::move(event));
    events_.clear();
    is_incomplete_ = false;
    return taken;
  }

 private:
  std::vector<KVCacheEvent> events_;
  bool is_incomplete_ = false;  // what came before events_ was dropped
};

}  // namespace paged_kv
