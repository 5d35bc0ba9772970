// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/free_queue.h"

#include "paged_kv/check.h"
#include "paged_kv/math.h"

namespace paged_kv {
namespace {

constexpr BlockId kNoBlock;

}  // namespace

FreeKVCacheBlockQueue::FreeKVCacheBlockQueue(std::span<KVCacheBlock> blocks) : blocks_(blocks) {
  const auto num_blocks = narrow<std::int32_t>(blocks.size(), "number of blocks");
  for (const KVCacheBlock& block : blocks) {
    PAGED_KV_CHECK(!block.in_free_queue, "block ", block.block_id, " is in a free queue already");
  }
  if (num_blocks == 0) return;
  for (std::int32_t i = 0; i < num_blocks; ++i) {
    KVCacheBlock& block = at(BlockId(i));
    block.prev_free_block = BlockId(i - 1);  // of the first: no block
    block.next_free_block = BlockId(i + 1);
    block.in_free_queue = true;
  }
  front_ = BlockId(0);
  back_ = BlockId(num_blocks - 1);
  at(back_).next_free_block = kNoBlock;
  num_free_blocks_ = num_blocks;
}

BlockId FreeKVCacheBlockQueue::popleft() {
  PAGED_KV_CHECK(num_free_blocks_ > 0, "No free blocks available");
  const BlockId block = front_;
  unlink(block);
  return block;
}

void FreeKVCacheBlockQueue::popleft_n(std::span<BlockId> out) {
  PAGED_KV_CHECK(out.size() <= static_cast<std::size_t>(num_free_blocks_), "cannot pop ",
                 out.size(), " blocks from a queue of ", num_free_blocks_);
  for (BlockId& block : out) {
    block = front_;
    unlink(block);
  }
}

void FreeKVCacheBlockQueue::remove(BlockId block) {
  PAGED_KV_CHECK(block.valid() && block.index() < blocks_.size() && at(block).in_free_queue,
                 "block ", block, " is not in the free queue");
  unlink(block);
}

void FreeKVCacheBlockQueue::append_n(std::span<const BlockId> blocks) {
  mark_as_free(blocks);
  link_between(back_, blocks, kNoBlock);
}

void FreeKVCacheBlockQueue::prepend_n(std::span<const BlockId> blocks) {
  mark_as_free(blocks);
  link_between(kNoBlock, blocks, front_);
}

std::vector<BlockId> FreeKVCacheBlockQueue::get_all_free_blocks() const {
  std::vector<BlockId> result;
  result.reserve(static_cast<std::size_t>(num_free_blocks_));
  for (BlockId block = front_; block.valid(); block = at(block).next_free_block) {
    result.push_back(block);
  }
  return result;
}

// Sets in_free_queue, so that a block that is named twice is refused too.
void FreeKVCacheBlockQueue::mark_as_free(std::span<const BlockId> blocks) {
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const BlockId block = blocks[i];
    const bool is_known = block.valid() && block.index() < blocks_.size();
    if (is_known && !at(block).in_free_queue) {
      at(block).in_free_queue = true;
      continue;
    }
    for (const BlockId marked : blocks.first(i)) at(marked).in_free_queue = false;
    PAGED_KV_CHECK(is_known, "block ", block, " is not one of the ", blocks_.size(), " blocks");
    PAGED_KV_CHECK(false, "block ", block, " is in the free queue already, or given twice");
  }
}

// Between two neighbours, either of which may be none: an end of the queue. The blocks are marked
// already. Each is written once, and none is read.
void FreeKVCacheBlockQueue::link_between(BlockId previous, std::span<const BlockId> blocks,
                                         BlockId next) noexcept {
  if (blocks.empty()) return;
  (previous.valid() ? at(previous).next_free_block : front_) = blocks.front();
  (next.valid() ? at(next).prev_free_block : back_) = blocks.back();
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    at(blocks[i]).prev_free_block = i == 0 ? previous : blocks[i - 1];
    at(blocks[i]).next_free_block = i + 1 == blocks.size() ? next : blocks[i + 1];
  }
  num_free_blocks_ += static_cast<std::int32_t>(blocks.size());
}

void FreeKVCacheBlockQueue::unlink(BlockId block) noexcept {
  const BlockId previous = at(block).prev_free_block;
  const BlockId next = at(block).next_free_block;
  (previous.valid() ? at(previous).next_free_block : front_) = next;
  (next.valid() ? at(next).prev_free_block : back_) = previous;
  at(block).prev_free_block = kNoBlock;
  at(block).next_free_block = kNoBlock;
  at(block).in_free_queue = false;
  --num_free_blocks_;
}

void FreeKVCacheBlockQueue::check_integrity() const {
  std::int32_t num_linked = 0;
  BlockId previous = kNoBlock;
  for (BlockId block = front_; block.valid(); block = at(block).next_free_block) {
    PAGED_KV_CHECK_AS(InvariantError, at(block).in_free_queue, "Q1: linked block ", block,
                      " is not marked as free");
    PAGED_KV_CHECK_AS(InvariantError, at(block).prev_free_block == previous, "Q2: block ", block,
                      " links back to ", at(block).prev_free_block, ", not to ", previous);
    previous = block;
    ++num_linked;
    PAGED_KV_CHECK_AS(InvariantError, num_linked <= num_free_blocks_, "Q1: more than ",
                      num_free_blocks_, " blocks are linked");
  }
  PAGED_KV_CHECK_AS(InvariantError, back_ == previous, "Q2: back is ", back_, ", not ", previous);
  PAGED_KV_CHECK_AS(InvariantError, num_linked == num_free_blocks_, "Q1: ", num_linked,
                    " blocks are linked, expected ", num_free_blocks_);

  std::int32_t num_marked = 0;
  for (const KVCacheBlock& block : blocks_) {
    if (block.in_free_queue) {
      ++num_marked;
      continue;
    }
    PAGED_KV_CHECK_AS(InvariantError,
                      !block.prev_free_block.valid() && !block.next_free_block.valid(),
                      "Q3: block ", block.block_id, " is outside the queue but linked");
  }
  PAGED_KV_CHECK_AS(InvariantError, num_marked == num_linked, "Q1: ", num_marked,
                    " blocks are marked as free, but ", num_linked, " are linked");
}

}  // namespace paged_kv
