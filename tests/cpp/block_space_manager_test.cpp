// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/block_space_manager.h"

#include "paged_kv/check.h"

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace paged_kv {
namespace {

using Seqs = std::vector<SeqId>;
using Copies = std::vector<BlockCopy>;

constexpr SeqId kA{1}, kB{2}, kC{3};

BlockSpaceManager make_manager(std::int32_t num_gpu_blocks = 11, std::int32_t num_cpu_blocks = 11,
                               double watermark = 0.0) {
  return BlockSpaceManager({.block_size = 4,
                            .num_gpu_blocks = num_gpu_blocks,
                            .num_cpu_blocks = num_cpu_blocks,
                            .watermark = watermark});
}

std::vector<std::int32_t> table(const BlockSpaceManager& manager, SeqId seq_id) {
  manager.check_integrity();
  std::vector<std::int32_t> ids;
  for (const BlockId block : manager.get_block_table(seq_id)) ids.push_back(block.value());
  return ids;
}

using Ids = std::vector<std::int32_t>;

TEST(BlockSpaceManager, SamplesOfAPromptShareItsBlocksUntilTheyWrite) {
  auto manager = make_manager();
  manager.allocate(Seqs{kA, kB, kC}, 6);
  EXPECT_EQ(manager.get_num_free_gpu_blocks(), 8);
  EXPECT_EQ(table(manager, kC), (Ids{1, 2}));
  // Two of three need a copy of the part-filled block; the last holder writes in place.
  EXPECT_EQ(manager.append_slots(Seqs{kA, kB, kC}),
            (Copies{{BlockId(2), BlockId(3)}, {BlockId(2), BlockId(4)}}));
  EXPECT_EQ(table(manager, kA), (Ids{1, 3}));
  EXPECT_EQ(table(manager, kB), (Ids{1, 4}));
  EXPECT_EQ(table(manager, kC), (Ids{1, 2}));
  EXPECT_TRUE(manager.append_slots(Seqs{kA, kB, kC}).empty());
}

TEST(BlockSpaceManager, AFullBlockIsNeverCopied) {
  auto manager = make_manager();
  manager.allocate(Seqs{kA}, 8);
  manager.fork(kA, kB);
  EXPECT_TRUE(manager.append_slots(Seqs{kA, kB}).empty());
  EXPECT_EQ(table(manager, kA), (Ids{1, 2, 3}));
  EXPECT_EQ(table(manager, kB), (Ids{1, 2, 4}));
}

TEST(BlockSpaceManager, AHolderOutsideTheGroupForcesACopyOfEach) {
  auto manager = make_manager();
  manager.allocate(Seqs{kA, kB, kC}, 5);
  EXPECT_EQ(manager.append_slots(Seqs{kA, kB}, 9).size(), 2U);
  EXPECT_EQ(table(manager, kA), (Ids{1, 3, 4, 5}));
  EXPECT_EQ(table(manager, kC), (Ids{1, 2}));
}

TEST(BlockSpaceManager, CanAllocateCountsTheWatermark) {
  auto manager = make_manager(11, 1, 0.2);
  EXPECT_EQ(manager.can_allocate(4 * 8), AllocStatus::kOk);
  EXPECT_EQ(manager.can_allocate(4 * 8 + 1), AllocStatus::kNever);
  manager.allocate(Seqs{kA}, 1);
  EXPECT_EQ(manager.can_allocate(4 * 8), AllocStatus::kLater);
  EXPECT_EQ(manager.can_allocate(4 * 7), AllocStatus::kOk);
  EXPECT_EQ(manager.can_allocate(INT64_MAX), AllocStatus::kNever);
}

TEST(BlockSpaceManager, SwappedSequencesShareWithEachOtherOnly) {
  auto manager = make_manager();
  manager.allocate(Seqs{kA, kB, kC}, 6);
  EXPECT_EQ(manager.swap_out(Seqs{kA, kB}),
            (Copies{{BlockId(1), BlockId(1)}, {BlockId(2), BlockId(2)}}));
  EXPECT_EQ(manager.get_device(kA), BlockDevice::kCpu);
  EXPECT_EQ(manager.get_num_free_gpu_blocks(), 8);
  EXPECT_EQ(manager.get_num_free_cpu_blocks(), 8);
  manager.check_integrity();
  EXPECT_TRUE(manager.append_slots(Seqs{kC}).empty());  // its only holder now
  EXPECT_EQ(manager.swap_in(Seqs{kA, kB}),
            (Copies{{BlockId(1), BlockId(3)}, {BlockId(2), BlockId(4)}}));
  EXPECT_EQ(table(manager, kB), (Ids{3, 4}));
  EXPECT_EQ(manager.append_slots(Seqs{kA, kB}).size(), 1U);
}

TEST(BlockSpaceManager, SwapInCountsTheAppendThatFollows) {
  auto manager = make_manager(5, 5);  // 4 blocks
  manager.allocate(Seqs{kA, kB}, 6);  // 2 blocks, and 1 for the copy on write
  EXPECT_EQ(manager.swap_out(Seqs{kA, kB}).size(), 2U);
  manager.allocate(Seqs{kC}, 8);
  EXPECT_EQ(manager.can_swap_in(Seqs{kA, kB}), AllocStatus::kLater);
  EXPECT_EQ(manager.can_swap_in(Seqs{kA, kB}, 0), AllocStatus::kOk);
  EXPECT_EQ(manager.can_swap_in(Seqs{kA, kB}, 10), AllocStatus::kNever);
  manager.free(kC);
  EXPECT_EQ(manager.can_swap_in(Seqs{kA, kB}), AllocStatus::kOk);
  EXPECT_EQ(manager.swap_in(Seqs{kA, kB}).size(), 2U);
  EXPECT_EQ(manager.append_slots(Seqs{kA, kB}).size(), 1U);
}

TEST(BlockSpaceManager, BlocksFreedLastAreHandedOutFirst) {
  auto manager = make_manager();
  manager.allocate(Seqs{kA}, 12);
  manager.fork(kA, kB);
  manager.free(kA);
  manager.free(kB);
  manager.free(kB);
  EXPECT_EQ(manager.get_num_free_gpu_blocks(), 10);
  manager.allocate(Seqs{kC}, 12);
  EXPECT_EQ(table(manager, kC), (Ids{3, 2, 1}));
}

TEST(BlockSpaceManager, AFailedCallChangesNothing) {
  auto manager = make_manager(5, 2);
  manager.allocate(Seqs{kA, kB}, 10);
  const auto expect_unchanged = [&] {
    EXPECT_EQ(table(manager, kA), (Ids{1, 2, 3}));
    EXPECT_EQ(table(manager, kB), (Ids{1, 2, 3}));
    EXPECT_EQ(manager.get_seq_ids().size(), 2U);
    EXPECT_EQ(manager.get_num_free_gpu_blocks(), 1);
    EXPECT_EQ(manager.get_num_free_cpu_blocks(), 1);
  };
  EXPECT_THROW(manager.allocate(Seqs{kC}, 5), OutOfBlocksError);
  EXPECT_THROW(manager.allocate(Seqs{kC, kA}, 1), std::invalid_argument);
  EXPECT_THROW(manager.allocate(Seqs{kC, kC}, 1), std::invalid_argument);
  EXPECT_THROW(manager.allocate(Seqs{}, 1), std::invalid_argument);
  EXPECT_THROW(manager.allocate(Seqs{kC}, -1), std::invalid_argument);
  EXPECT_FALSE(manager.can_append_slots(Seqs{kA, kB}, 3));
  EXPECT_THROW(static_cast<void>(manager.append_slots(Seqs{kA, kB}, 3)), OutOfBlocksError);
  EXPECT_THROW(static_cast<void>(manager.append_slots(Seqs{kA, kA})), std::invalid_argument);
  EXPECT_THROW(static_cast<void>(manager.append_slots(Seqs{kC})), std::invalid_argument);
  EXPECT_THROW(static_cast<void>(manager.append_slots(Seqs{kA}, -1)), std::invalid_argument);
  EXPECT_THROW(static_cast<void>(manager.append_slots(Seqs{kA}, INT64_MAX)), std::invalid_argument);
  EXPECT_THROW(manager.fork(kA, kB), std::invalid_argument);
  EXPECT_THROW(manager.fork(kC, SeqId(4)), std::invalid_argument);
  EXPECT_FALSE(manager.can_swap_out(Seqs{kA}));
  EXPECT_THROW(static_cast<void>(manager.swap_out(Seqs{kA})), OutOfBlocksError);
  EXPECT_THROW(static_cast<void>(manager.swap_in(Seqs{kA})), std::invalid_argument);
  EXPECT_THROW(static_cast<void>(manager.get_block_table(kC)), std::invalid_argument);
  expect_unchanged();
}

TEST(BlockSpaceManager, RefusesBadOptions) {
  EXPECT_THROW(BlockSpaceManager({.block_size = 0, .num_gpu_blocks = 2}), std::invalid_argument);
  EXPECT_THROW(BlockSpaceManager({.block_size = 1, .num_gpu_blocks = 0}), std::invalid_argument);
  EXPECT_THROW(make_manager(2, 0), std::invalid_argument);
  EXPECT_THROW(make_manager(2, 2, 1.0), std::invalid_argument);
}

// Every token of every sequence reads back after any calls, and no answer of can_...() is wrong.
// Content is modelled as one number a slot of two caches, moved only by the returned copies.
class ContentModel {
 public:
  explicit ContentModel(unsigned seed) : rng_(seed) {}

  void step() {
    switch (pick(6)) {
      case 0:
        return allocate();
      case 1:
        return fork();
      case 2:
        return append();
      case 3:
        return swap_out();
      case 4:
        return swap_in();
      default:
        return free();
    }
  }

  void check() const {
    manager_.check_integrity();
    ASSERT_EQ(manager_.get_seq_ids().size(), tokens_.size());
    for (const auto& [seq_id, tokens] : tokens_) {
      ASSERT_EQ(manager_.get_num_tokens(seq_id), static_cast<std::int64_t>(tokens.size()));
      const auto& cache = manager_.get_device(seq_id) == BlockDevice::kGpu ? gpu_ : cpu_;
      const auto blocks = manager_.get_block_table(seq_id);
      for (std::size_t i = 0; i < tokens.size(); ++i) {
        ASSERT_EQ(cache[blocks[i / 4].index() * 4 + i % 4], tokens[i]);
      }
    }
  }

 private:
  static constexpr std::size_t kNumSlots = 4 * 12;
  using Cache = std::vector<int>;

  [[nodiscard]] int pick(int n) { return std::uniform_int_distribution(0, n - 1)(rng_); }

  // Some of the sequences on one device.
  [[nodiscard]] Seqs pick_on(BlockDevice device) {
    Seqs picked;
    for (const auto& [seq_id, tokens] : tokens_) {
      if (manager_.get_device(seq_id) == device && pick(2) == 0) picked.push_back(seq_id);
    }
    std::shuffle(picked.begin(), picked.end(), rng_);
    return picked;
  }

  static void copy(const Cache& src, Cache& dst, const Copies& copies) {
    for (const BlockCopy& pair : copies) {
      for (std::size_t i = 0; i < 4; ++i) {
        dst[pair.dst.index() * 4 + i] = src[pair.src.index() * 4 + i];
      }
    }
  }

  void write(SeqId seq_id, int num_tokens) {
    std::vector<int>& tokens = tokens_[seq_id];
    const auto blocks = manager_.get_block_table(seq_id);
    for (int i = 0; i < num_tokens; ++i) {
      gpu_[blocks[tokens.size() / 4].index() * 4 + tokens.size() % 4] = next_token_;
      tokens.push_back(next_token_++);
    }
  }

  void allocate() {
    const int num_tokens = pick(12);
    const Seqs group{SeqId(next_seq_), SeqId(next_seq_ + 1)};
    if (manager_.can_allocate(num_tokens) != AllocStatus::kOk) {
      EXPECT_THROW(manager_.allocate(group, num_tokens), OutOfBlocksError);
      return;
    }
    manager_.allocate(group, num_tokens);
    write(group[0], num_tokens);
    tokens_[group[1]] = tokens_[group[0]];
    next_seq_ += 2;
  }

  void fork() {
    if (tokens_.empty()) return;
    const auto parent = std::next(tokens_.begin(), pick(static_cast<int>(tokens_.size())));
    manager_.fork(parent->first, SeqId(next_seq_));
    tokens_[SeqId(next_seq_++)] = parent->second;
  }

  void append() {
    const Seqs group = pick_on(BlockDevice::kGpu);
    const int num_tokens = pick(6);
    if (!manager_.can_append_slots(group, num_tokens)) {
      EXPECT_THROW(static_cast<void>(manager_.append_slots(group, num_tokens)), OutOfBlocksError);
      return;
    }
    const Cache before = gpu_;
    copy(before, gpu_, manager_.append_slots(group, num_tokens));
    for (const SeqId seq_id : group) write(seq_id, num_tokens);
  }

  void swap_out() {
    const Seqs group = pick_on(BlockDevice::kGpu);
    if (!manager_.can_swap_out(group)) {
      EXPECT_THROW(static_cast<void>(manager_.swap_out(group)), OutOfBlocksError);
      return;
    }
    copy(gpu_, cpu_, manager_.swap_out(group));
  }

  void swap_in() {
    const Seqs group = pick_on(BlockDevice::kCpu);
    const int num_tokens = pick(6);
    const AllocStatus status = manager_.can_swap_in(group, num_tokens);
    if (status == AllocStatus::kOk) {
      copy(cpu_, gpu_, manager_.swap_in(group));
      EXPECT_TRUE(manager_.can_append_slots(group, num_tokens));
      return;
    }
    if (manager_.can_swap_in(group, 0) != AllocStatus::kOk) {
      EXPECT_THROW(static_cast<void>(manager_.swap_in(group)), OutOfBlocksError);
    }
  }

  void free() {
    if (tokens_.empty()) return;
    const auto seq = std::next(tokens_.begin(), pick(static_cast<int>(tokens_.size())));
    manager_.free(seq->first);
    tokens_.erase(seq);
  }

  std::mt19937 rng_;
  BlockSpaceManager manager_ = make_manager(12, 8);
  Cache gpu_ = Cache(kNumSlots, -1);
  Cache cpu_ = Cache(kNumSlots, -1);
  std::map<SeqId, std::vector<int>> tokens_;
  std::int64_t next_seq_ = 0;
  int next_token_ = 0;
};

TEST(BlockSpaceManager, EveryTokenReadsBackAfterRandomCalls) {
  for (unsigned seed = 0; seed < 40; ++seed) {
    ContentModel model(seed);
    for (int i = 0; i < 200; ++i) {
      model.step();
      model.check();
      if (HasFatalFailure()) FAIL() << "seed " << seed << ", step " << i;
    }
  }
}

}  // namespace
}  // namespace paged_kv
