// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/block_space_manager.h"

#include "paged_kv/check.h"
#include "paged_kv/make_room.h"
#include "paged_kv/math.h"

#include <algorithm>
#include <utility>

namespace paged_kv {
namespace {

// No count is above kMaxInt32: sums of tokens and of blocks stay within 64 bits.
const BlockSpaceManagerOptions& checked(const BlockSpaceManagerOptions& options) {
  PAGED_KV_CHECK(options.block_size > 0 && options.block_size <= kMaxInt32,
                 "block_size must be in [1, ", kMaxInt32, "], got ", options.block_size);
  PAGED_KV_CHECK(options.num_gpu_blocks > 0, "num_gpu_blocks must be positive, got ",
                 options.num_gpu_blocks);
  PAGED_KV_CHECK(options.num_cpu_blocks > 0, "num_cpu_blocks must be positive, got ",
                 options.num_cpu_blocks);
  PAGED_KV_CHECK(options.watermark >= 0.0 && options.watermark < 1.0,
                 "watermark must be in [0, 1), got ", options.watermark);
  return options;
}

// Blocks are not found again by content here: sharing is by fork() alone.
constexpr bool kNoCaching = false;
constexpr std::int32_t kAnyHashBlockSize = 1;

void check_distinct(std::span<const SeqId> seq_ids) {
  std::vector<SeqId> sorted(seq_ids.begin(), seq_ids.end());
  std::ranges::sort(sorted);
  const auto twice = std::ranges::adjacent_find(sorted);
  PAGED_KV_CHECK(twice == sorted.end(), "seq_ids: sequence ", *twice, " is given twice");
}

void check_num_new_tokens(std::int64_t num_new_tokens) {
  PAGED_KV_CHECK(num_new_tokens >= 0 && num_new_tokens <= kMaxInt32,
                 "num_new_tokens must be in [0, ", kMaxInt32, "], got ", num_new_tokens);
}

const char* name_of(BlockDevice device) {
  return device == BlockDevice::kGpu ? "the GPU" : "the CPU";
}

}  // namespace

BlockSpaceManager::BlockSpaceManager(const BlockSpaceManagerOptions& options)
    : options_(checked(options)),
      num_watermark_blocks_(static_cast<std::int64_t>(options.watermark * options.num_gpu_blocks)),
      gpu_pool_(options.num_gpu_blocks, kNoCaching, kAnyHashBlockSize),
      cpu_pool_(options.num_cpu_blocks, kNoCaching, kAnyHashBlockSize),
      scratch_(static_cast<std::size_t>(std::max(options.num_gpu_blocks, options.num_cpu_blocks)),
               0) {
  // Giving blocks back must not fail half-way for want of memory.
  last_first_.reserve(scratch_.size());
}

AllocStatus BlockSpaceManager::can_allocate(std::int64_t num_tokens) const {
  PAGED_KV_CHECK(num_tokens >= 0, "num_tokens must not be negative, got ", num_tokens);
  return status_of(num_blocks_of(num_tokens));
}

void BlockSpaceManager::allocate(std::span<const SeqId> seq_ids, std::int64_t num_tokens) {
  PAGED_KV_CHECK(num_tokens >= 0, "num_tokens must not be negative, got ", num_tokens);
  PAGED_KV_CHECK(!seq_ids.empty(), "seq_ids: expected at least one sequence");
  check_distinct(seq_ids);
  for (const SeqId seq_id : seq_ids) {
    PAGED_KV_CHECK(!contains(seq_id), "sequence ", seq_id, " exists already");
  }
  const std::int64_t num_blocks = num_blocks_of(num_tokens);
  gpu_pool_.check_get_new_blocks(num_blocks);
  // Everything that may throw comes first.
  std::unordered_map<SeqId, Sequence> added;
  for (const SeqId seq_id : seq_ids) {
    std::vector<BlockId> blocks(static_cast<std::size_t>(num_blocks));
    added.emplace(seq_id, Sequence{std::move(blocks), num_tokens, BlockDevice::kGpu});
  }
  sequences_.reserve(sequences_.size() + added.size());
  const std::vector<BlockId> new_blocks = gpu_pool_.get_new_blocks(num_blocks);

  for (auto& [seq_id, sequence] : added) {
    if (seq_id != seq_ids.front()) gpu_pool_.touch(new_blocks);
    std::ranges::copy(new_blocks, sequence.blocks.begin());
  }
  sequences_.merge(added);
}

bool BlockSpaceManager::can_append_slots(std::span<const SeqId> seq_ids,
                                         std::int64_t num_new_tokens) const {
  check_num_new_tokens(num_new_tokens);
  const SequencePtrs sequences = find_on(BlockDevice::kGpu, seq_ids);
  return num_blocks_to_append(sequences, num_new_tokens) <= get_num_free_gpu_blocks();
}

std::vector<BlockCopy> BlockSpaceManager::append_slots(std::span<const SeqId> seq_ids,
                                                       std::int64_t num_new_tokens) {
  check_num_new_tokens(num_new_tokens);
  const std::int64_t num_new_blocks =
      num_blocks_to_append(find_on(BlockDevice::kGpu, seq_ids), num_new_tokens);
  std::vector<BlockCopy> copies;
  if (num_new_tokens == 0) return copies;
  gpu_pool_.check_get_new_blocks(num_new_blocks);
  // Everything that may throw comes first.
  copies.reserve(seq_ids.size());
  for (const SeqId seq_id : seq_ids) {
    Sequence& sequence = sequences_.at(seq_id);
    make_room(sequence.blocks, sequence.blocks.size() + static_cast<std::size_t>(num_added_blocks(
                                                            sequence, num_new_tokens)));
  }
  const std::vector<BlockId> new_blocks = gpu_pool_.get_new_blocks(num_new_blocks);

  auto next_block = new_blocks.begin();
  for (const SeqId seq_id : seq_ids) {
    Sequence& sequence = sequences_.at(seq_id);
    const std::int64_t num_added = num_added_blocks(sequence, num_new_tokens);
    if (is_part_filled(sequence)) {
      BlockId& last = sequence.blocks.back();
      if (gpu_pool_.blocks()[last.index()].ref_cnt > 1) {
        copies.push_back({last, *next_block});
        gpu_pool_.free_blocks({&last, 1});
        last = *next_block++;
      }
    }
    sequence.blocks.insert(sequence.blocks.end(), next_block, next_block + num_added);
    next_block += num_added;
    sequence.num_tokens += num_new_tokens;
  }
  return copies;
}

void BlockSpaceManager::fork(SeqId parent, SeqId child) {
  const Sequence& source = at(parent);
  PAGED_KV_CHECK(!contains(child), "sequence ", child, " exists already");
  const auto forked = sequences_.emplace(child, source).first;
  pool(forked->second.device).touch(forked->second.blocks);
}

bool BlockSpaceManager::can_swap_out(std::span<const SeqId> seq_ids) const {
  const auto num_blocks = distinct_blocks(find_on(BlockDevice::kGpu, seq_ids)).size();
  return static_cast<std::int64_t>(num_blocks) <= get_num_free_cpu_blocks();
}

std::vector<BlockCopy> BlockSpaceManager::swap_out(std::span<const SeqId> seq_ids) {
  return move(seq_ids, BlockDevice::kGpu, BlockDevice::kCpu);
}

AllocStatus BlockSpaceManager::can_swap_in(std::span<const SeqId> seq_ids,
                                           std::int64_t num_new_tokens) const {
  check_num_new_tokens(num_new_tokens);
  const SequencePtrs sequences = find_on(BlockDevice::kCpu, seq_ids);
  auto num_blocks = static_cast<std::int64_t>(distinct_blocks(sequences).size());
  if (num_new_tokens > 0) num_blocks += num_copies_once_alone(sequences);
  for (const Sequence* sequence : sequences) {
    num_blocks += num_added_blocks(*sequence, num_new_tokens);
  }
  return status_of(num_blocks);
}

std::vector<BlockCopy> BlockSpaceManager::swap_in(std::span<const SeqId> seq_ids) {
  return move(seq_ids, BlockDevice::kCpu, BlockDevice::kGpu);
}

void BlockSpaceManager::free(SeqId seq_id) {
  const auto found = sequences_.find(seq_id);
  if (found == sequences_.end()) return;
  release(found->second);
  sequences_.erase(found);
}

void BlockSpaceManager::reset() {
  for (const auto& [seq_id, sequence] : sequences_) release(sequence);
  sequences_.clear();
}

std::vector<SeqId> BlockSpaceManager::get_seq_ids() const {
  std::vector<SeqId> seq_ids;
  seq_ids.reserve(sequences_.size());
  for (const auto& [seq_id, sequence] : sequences_) seq_ids.push_back(seq_id);
  return seq_ids;
}

const BlockSpaceManager::Sequence& BlockSpaceManager::at(SeqId seq_id) const {
  const auto found = sequences_.find(seq_id);
  PAGED_KV_CHECK(found != sequences_.end(), "sequence ", seq_id, " does not exist");
  return found->second;
}

// The sequences, which must be different and lie on `device`.
BlockSpaceManager::SequencePtrs BlockSpaceManager::find_on(BlockDevice device,
                                                           std::span<const SeqId> seq_ids) const {
  check_distinct(seq_ids);
  SequencePtrs sequences;
  sequences.reserve(seq_ids.size());
  for (const SeqId seq_id : seq_ids) {
    const Sequence& sequence = at(seq_id);
    PAGED_KV_CHECK(sequence.device == device, "sequence ", seq_id, ": expected to lie on ",
                   name_of(device), ", but it lies on ", name_of(sequence.device));
    sequences.push_back(&sequence);
  }
  return sequences;
}

AllocStatus BlockSpaceManager::status_of(std::int64_t num_blocks) const noexcept {
  const std::int64_t num_wanted = num_blocks + num_watermark_blocks_;
  if (num_wanted > options_.num_gpu_blocks - 1) return AllocStatus::kNever;
  return num_wanted <= get_num_free_gpu_blocks() ? AllocStatus::kOk : AllocStatus::kLater;
}

// scratch_[b] counts the sequences before this one that have given up block b by copying it.
std::int64_t BlockSpaceManager::num_blocks_to_append(const SequencePtrs& sequences,
                                                     std::int64_t num_new_tokens) const {
  std::int64_t num_blocks = 0;
  for (const Sequence* sequence : sequences) {
    num_blocks += num_added_blocks(*sequence, num_new_tokens);
  }
  if (num_new_tokens == 0) return num_blocks;
  for (const Sequence* sequence : sequences) {
    if (!is_part_filled(*sequence)) continue;
    const std::size_t last = sequence->blocks.back().index();
    const bool is_copied = gpu_pool_.blocks()[last].ref_cnt - scratch_[last] > 1;
    scratch_[last] += is_copied ? 1 : 0;
    num_blocks += is_copied ? 1 : 0;
  }
  for (const Sequence* sequence : sequences) {
    if (is_part_filled(*sequence)) scratch_[sequence->blocks.back().index()] = 0;
  }
  return num_blocks;
}

// Copies that an append needs when nobody but `sequences` holds their blocks: all but the last of
// those that share a part-filled block.
std::int64_t BlockSpaceManager::num_copies_once_alone(const SequencePtrs& sequences) const {
  std::int64_t num_copies = 0;
  for (const Sequence* sequence : sequences) {
    if (!is_part_filled(*sequence)) continue;
    std::int32_t& num_holders = scratch_[sequence->blocks.back().index()];
    if (num_holders > 0) ++num_copies;
    ++num_holders;
  }
  for (const Sequence* sequence : sequences) {
    if (is_part_filled(*sequence)) scratch_[sequence->blocks.back().index()] = 0;
  }
  return num_copies;
}

// In the order in which they are first met.
std::vector<BlockId> BlockSpaceManager::distinct_blocks(const SequencePtrs& sequences) const {
  std::vector<BlockId> blocks;
  std::size_t num_entries = 0;
  for (const Sequence* sequence : sequences) num_entries += sequence->blocks.size();
  blocks.reserve(num_entries);
  for (const Sequence* sequence : sequences) {
    for (const BlockId block : sequence->blocks) {
      if (std::exchange(scratch_[block.index()], 1) == 0) blocks.push_back(block);
    }
  }
  for (const BlockId block : blocks) scratch_[block.index()] = 0;
  return blocks;
}

// While blocks move, scratch_[old block] is the new one; 0, the null block, stands for none.
std::vector<BlockCopy> BlockSpaceManager::move(std::span<const SeqId> seq_ids, BlockDevice source,
                                               BlockDevice target) {
  const std::vector<BlockId> old_blocks = distinct_blocks(find_on(source, seq_ids));
  std::vector<BlockCopy> copies(old_blocks.size());
  const std::vector<BlockId> new_blocks =
      pool(target).get_new_blocks(static_cast<std::int64_t>(old_blocks.size()));
  for (std::size_t i = 0; i < copies.size(); ++i) {
    copies[i] = {old_blocks[i], new_blocks[i]};
    scratch_[old_blocks[i].index()] = new_blocks[i].value();
  }
  for (const SeqId seq_id : seq_ids) {
    Sequence& sequence = sequences_.at(seq_id);
    release(sequence);
    for (BlockId& block : sequence.blocks) block = BlockId(scratch_[block.index()]);
    pool(target).touch(sequence.blocks);
    sequence.device = target;
  }
  pool(target).free_blocks(new_blocks);  // get_new_blocks() counted one holder too many
  for (const BlockId block : old_blocks) scratch_[block.index()] = 0;
  return copies;
}

void BlockSpaceManager::release(const Sequence& sequence) {
  last_first_.assign(sequence.blocks.rbegin(), sequence.blocks.rend());
  pool(sequence.device).free_blocks(last_first_);
}

void BlockSpaceManager::check_integrity() const {
  gpu_pool_.check_integrity();
  cpu_pool_.check_integrity();
  struct Use {
    std::int32_t num_holders = 0;
    std::int64_t place = 0;
    std::int64_t num_tokens = 0;
  };
  std::vector<Use> gpu_uses(gpu_pool_.blocks().size());
  std::vector<Use> cpu_uses(cpu_pool_.blocks().size());
  for (const auto& [seq_id, sequence] : sequences_) {
    const auto num_blocks = static_cast<std::int64_t>(sequence.blocks.size());
    PAGED_KV_CHECK_AS(InvariantError, num_blocks == num_blocks_of(sequence.num_tokens),
                      "S2: sequence ", seq_id, " of ", sequence.num_tokens, " tokens holds ",
                      num_blocks, " blocks");
    auto& uses = sequence.device == BlockDevice::kGpu ? gpu_uses : cpu_uses;
    for (std::int64_t place = 0; place < num_blocks; ++place) {
      const BlockId block = sequence.blocks[static_cast<std::size_t>(place)];
      PAGED_KV_CHECK_AS(InvariantError,
                        block.valid() && block != kNullBlockId && block.index() < uses.size(),
                        "S2: sequence ", seq_id, " holds block ", block);
      const std::int64_t num_tokens =
          std::min(options_.block_size, sequence.num_tokens - place * options_.block_size);
      Use& use = uses[block.index()];
      // The same place for all holders also means: not twice in one sequence.
      PAGED_KV_CHECK_AS(
          InvariantError,
          use.num_holders == 0 || (use.place == place && use.num_tokens == num_tokens),
          "S3: block ", block, " is shared at different places or lengths");
      use = {use.num_holders + 1, place, num_tokens};
    }
  }
  const auto check_counts = [](const BlockPool& pool, const std::vector<Use>& uses) {
    for (const KVCacheBlock& block : pool.blocks()) {
      const std::int32_t num_holders = uses[block.block_id.index()].num_holders;
      PAGED_KV_CHECK_AS(InvariantError, block.ref_cnt == num_holders, "S1: block ", block.block_id,
                        " has ref_cnt ", block.ref_cnt, ", but ", num_holders, " holders");
    }
  };
  check_counts(gpu_pool_, gpu_uses);
  check_counts(cpu_pool_, cpu_uses);
}

}  // namespace paged_kv
