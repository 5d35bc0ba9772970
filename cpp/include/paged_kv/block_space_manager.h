// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "paged_kv/block_pool.h"
#include "paged_kv/ids.h"
#include "paged_kv/math.h"

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace paged_kv {

// A sequence: one candidate text of a request. The caller chooses the number.
using SeqId = StrongId<struct SeqIdTag, std::int64_t>;

// Whether something fits: now, after others have freed blocks, or not even into an empty pool.
enum class AllocStatus { kOk, kLater, kNever };

// The pool that a sequence's blocks are from.
enum class BlockDevice { kGpu, kCpu };

// Content to copy, one row of what the ops copy_blocks and swap_blocks take. A swap's source and
// destination are blocks of different pools.
struct BlockCopy {
  BlockId src;
  BlockId dst;
  friend bool operator==(const BlockCopy&, const BlockCopy&) = default;
};

struct BlockSpaceManagerOptions {
  std::int64_t block_size = 0;  // tokens per block
  // Both count block 0, the null block of each pool, which is never handed out.
  std::int32_t num_gpu_blocks = 0;
  std::int32_t num_cpu_blocks = 1;  // 1: no swap space
  // Share of num_gpu_blocks that can_allocate() and can_swap_in() leave free, so that a sequence
  // just let in does not at once evict another.
  double watermark = 0.01;
};

// Who holds which block, for sequences that branch: parallel sampling and beam search.
//
// Forked sequences share their blocks. Content is only ever added behind a sequence's last token,
// so full blocks are shared for good; a block that is filled in part is copied before the first
// write by a sequence that is not its only holder (copy-on-write). Nothing here touches tensors:
// methods return the copies that the caller must run.
//
// Copies of one call are independent of each other (no destination is a source, or twice one), so
// one call of copy_blocks or swap_blocks runs them. They must run before anything is written to
// the cache for a later call: a block freed here may be handed out again at once.
//
// Order of freeing: a sequence's last block first, and the block freed last is handed out next, so
// the pool works on few, recently used blocks.
//
// A call that throws changes nothing. std::invalid_argument: a sequence that does not exist, is
// given twice, or lies on the wrong device. can_...() answers are exact: after true or kOk the
// call succeeds.
//
// Invariants, checked by check_integrity():
//   S1  both pools are sound, and the reference count of each block is the number of sequences
//       that hold it;
//   S2  a sequence of n tokens holds ceil(n / block_size) blocks, all different, none the null
//       block;
//   S3  who share a block have it at the same place and filled to the same token.
//
// Cost, whatever the size of the pools: O(blocks of the sequences named); of append_slots() and
// can_append_slots() O(n log n + blocks added) for n sequences.
// Thread rule: one owner thread.
// Source: vLLM 0.5 core/block_manager_v1.py::BlockSpaceManagerV1.
class BlockSpaceManager {
 public:
  explicit BlockSpaceManager(const BlockSpaceManagerOptions& options);

  [[nodiscard]] const BlockSpaceManagerOptions& options() const noexcept { return options_; }
  [[nodiscard]] std::int32_t get_num_free_gpu_blocks() const noexcept {
    return gpu_pool_.get_num_free_blocks();
  }
  [[nodiscard]] std::int32_t get_num_free_cpu_blocks() const noexcept {
    return cpu_pool_.get_num_free_blocks();
  }

  // For a prompt of `num_tokens`, whatever the number of sequences that share it.
  [[nodiscard]] AllocStatus can_allocate(std::int64_t num_tokens) const;
  // New sequences that share one prompt. The watermark is not enforced here. Throws
  // OutOfBlocksError.
  void allocate(std::span<const SeqId> seq_ids, std::int64_t num_tokens);

  // Room for `num_new_tokens` more tokens of each sequence. Copy-on-write happens in the order
  // given: the last of those that share a block writes in place, if nobody else holds it.
  [[nodiscard]] bool can_append_slots(std::span<const SeqId> seq_ids,
                                      std::int64_t num_new_tokens = 1) const;
  // Returns the copies to run before the tokens are written. Throws OutOfBlocksError.
  [[nodiscard]] std::vector<BlockCopy> append_slots(std::span<const SeqId> seq_ids,
                                                    std::int64_t num_new_tokens = 1);

  // `child` becomes a sequence with the tokens and blocks of `parent`, on its device.
  void fork(SeqId parent, SeqId child);

  // Moves sequences to the CPU's blocks and back; those that share blocks go on sharing them with
  // each other, not with sequences that stay. Returns (gpu, cpu) and (cpu, gpu) pairs. Throws
  // OutOfBlocksError.
  [[nodiscard]] bool can_swap_out(std::span<const SeqId> seq_ids) const;
  [[nodiscard]] std::vector<BlockCopy> swap_out(std::span<const SeqId> seq_ids);
  // Asks also for the blocks of an append_slots(seq_ids, num_new_tokens) that follows.
  [[nodiscard]] AllocStatus can_swap_in(std::span<const SeqId> seq_ids,
                                        std::int64_t num_new_tokens = 1) const;
  [[nodiscard]] std::vector<BlockCopy> swap_in(std::span<const SeqId> seq_ids);

  // Forgets a sequence. One that does not exist (freed already, never let in) is no error.
  void free(SeqId seq_id);
  // Forgets all.
  void reset();

  [[nodiscard]] bool contains(SeqId seq_id) const { return sequences_.contains(seq_id); }
  [[nodiscard]] std::int64_t get_num_tokens(SeqId seq_id) const { return at(seq_id).num_tokens; }
  [[nodiscard]] BlockDevice get_device(SeqId seq_id) const { return at(seq_id).device; }
  // Valid until the next change of the sequence.
  [[nodiscard]] std::span<const BlockId> get_block_table(SeqId seq_id) const {
    return at(seq_id).blocks;
  }
  // In no order.
  [[nodiscard]] std::vector<SeqId> get_seq_ids() const;

  // Throws InvariantError if S1 .. S3 do not hold. O(blocks of the pools and of all sequences).
  void check_integrity() const;

 private:
  struct Sequence {
    std::vector<BlockId> blocks;
    std::int64_t num_tokens = 0;
    BlockDevice device = BlockDevice::kGpu;
  };
  using SequencePtrs = std::vector<const Sequence*>;

  [[nodiscard]] const Sequence& at(SeqId seq_id) const;
  [[nodiscard]] SequencePtrs find_on(BlockDevice device, std::span<const SeqId> seq_ids) const;
  [[nodiscard]] BlockPool& pool(BlockDevice device) noexcept {
    return device == BlockDevice::kGpu ? gpu_pool_ : cpu_pool_;
  }
  [[nodiscard]] bool is_part_filled(const Sequence& sequence) const noexcept {
    return sequence.num_tokens % options_.block_size != 0;
  }
  [[nodiscard]] AllocStatus status_of(std::int64_t num_blocks) const noexcept;
  [[nodiscard]] std::int64_t num_blocks_of(std::int64_t num_tokens) const noexcept {
    return ceil_div(num_tokens, options_.block_size);
  }
  // Blocks behind the last one that the sequence holds.
  [[nodiscard]] std::int64_t num_added_blocks(const Sequence& sequence,
                                              std::int64_t num_new_tokens) const noexcept {
    return num_blocks_of(sequence.num_tokens + num_new_tokens) - num_blocks_of(sequence.num_tokens);
  }
  [[nodiscard]] std::int64_t num_blocks_to_append(const SequencePtrs& sequences,
                                                  std::int64_t num_new_tokens) const;
  [[nodiscard]] std::int64_t num_copies_once_alone(const SequencePtrs& sequences) const;
  [[nodiscard]] std::vector<BlockId> distinct_blocks(const SequencePtrs& sequences) const;
  [[nodiscard]] std::vector<BlockCopy> move(std::span<const SeqId> seq_ids, BlockDevice source,
                                            BlockDevice target);
  void release(const Sequence& sequence);

  BlockSpaceManagerOptions options_;
  std::int64_t num_watermark_blocks_;
  BlockPool gpu_pool_;
  BlockPool cpu_pool_;
  std::unordered_map<SeqId, Sequence> sequences_;
  // One entry a block, of either pool; all 0 between calls. Saves a set a call.
  mutable std::vector<std::int32_t> scratch_;
  std::vector<BlockId> last_first_;  // kept, so that release() does not allocate
};

}  // namespace paged_kv
