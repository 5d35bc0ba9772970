// SPDX-License-Identifier: Apache-2.0
//
// Which free blocks are reused first, and so which cached content is lost first: the one file that
// decides it.
//
// Blocks are taken from the front of the free queue. When the last holder of a block lets go of it,
// a policy puts it at the front or at the back; blocks freed by one call keep their order within
// both. That is all: nothing moves in the queue afterwards, except that a hit takes a block out.
#pragma once

#include "paged_kv/kv_block.h"

#include <cstdint>

namespace paged_kv {

enum class FreePlace : std::uint8_t {
  kFront,  // reused next
  kBack,   // reused after all that are free now
};

// Least recently used: what a later request might still find goes to the back.
// Source: vLLM 0.32 v1/core/block_pool.py::BlockPool.free_blocks.
[[nodiscard]] inline FreePlace lru_place(const KVCacheBlock& block) noexcept {
  return block.is_hashed() ? FreePlace::kBack : FreePlace::kFront;
}

// Another rule than lru_place(). A pool without a policy calls no virtual function.
//
// Example: content that was found at least once outlives content that never was.
//   class KeepWhatWasFound final : public EvictionPolicy {
//    public:
//     FreePlace place(const KVCacheBlock& block) noexcept override {
//       return block.num_hits > 0 ? FreePlace::kBack : FreePlace::kFront;
//     }
//   };
class EvictionPolicy {
 public:
  EvictionPolicy() = default;
  EvictionPolicy(const EvictionPolicy&) = delete;
  EvictionPolicy& operator=(const EvictionPolicy&) = delete;
  virtual ~EvictionPolicy() = default;

  // Where a block goes that nobody holds any more. Called once each time, with the block as it was
  // held (its ref_cnt is 0 already). It must not call the pool.
  [[nodiscard]] virtual FreePlace place(const KVCacheBlock& block) noexcept = 0;
};

}  // namespace paged_kv
