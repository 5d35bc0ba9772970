// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "paged_kv/ids.h"
#include "paged_kv/kv_block.h"

#include <cstdint>
#include <span>
#include <vector>

namespace paged_kv {

// The free blocks in the order in which they will be reused: a doubly linked list through the
// blocks themselves.
//
// The queue works on blocks that somebody else owns; a BlockId here is a position in that span.
// Arguments are checked before anything changes, and a check that fails throws
// std::invalid_argument.
//
// Invariants, checked by check_integrity():
//   Q1  following next_free_block from the front visits exactly the blocks with in_free_queue,
//       each once, and num_free_blocks() of them;
//   Q2  prev_free_block is the reverse of next_free_block;
//   Q3  a block outside the queue has no links.
//
// Cost: O(1) per block moved, no allocation. Thread rule: one owner thread.
// Source: vLLM 0.32 v1/core/kv_cache_utils.py::FreeKVCacheBlockQueue.
class FreeKVCacheBlockQueue {
 public:
  // All of `blocks`, in order. None may be in a queue. `blocks` must outlive the queue.
  explicit FreeKVCacheBlockQueue(std::span<KVCacheBlock> blocks);

  [[nodiscard]] std::int32_t num_free_blocks() const noexcept { return num_free_blocks_; }

  // Takes the first block, or the first `out.size()` blocks in order.
  [[nodiscard]] BlockId popleft();
  void popleft_n(std::span<BlockId> out);

  // Takes out a block from anywhere in the queue.
  void remove(BlockId block);

  // Puts blocks that are in no queue at the back or the front; the order within `blocks` is kept,
  // so that blocks[0] is reused before blocks[1].
  void append(BlockId block) { append_n({&block, 1}); }
  void append_n(std::span<const BlockId> blocks);
  void prepend_n(std::span<const BlockId> blocks);

  // In order of reuse. Allocates.
  [[nodiscard]] std::vector<BlockId> get_all_free_blocks() const;

  // Throws InvariantError if Q1 .. Q3 do not hold. O(number of blocks).
  void check_integrity() const;

 private:
  [[nodiscard]] KVCacheBlock& at(BlockId block) noexcept { return blocks_[block.index()]; }
  [[nodiscard]] const KVCacheBlock& at(BlockId block) const noexcept {
    return blocks_[block.index()];
  }
  void mark_as_free(std::span<const BlockId> blocks);
  void link_between(BlockId previous, std::span<const BlockId> blocks, BlockId next) noexcept;
  void unlink(BlockId block) noexcept;

  std::span<KVCacheBlock> blocks_;
  BlockId front_;
  BlockId back_;
  std::int32_t num_free_blocks_ = 0;
};

}  // namespace paged_kv
