// SPDX-License-Identifier: Apache-2.0
//
// Calls that run out of memory change nothing, whichever of their allocations fails.
#include "failing_allocations.h"

#include "paged_kv/block_space_manager.h"
#include "paged_kv/block_table.h"

#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

namespace paged_kv {
namespace {

using testing::fail_at_each_allocation;

constexpr std::int64_t kBlockSize = 4;

// All that can be seen of a manager.
struct Snapshot {
  explicit Snapshot(const BlockSpaceManager& manager)
      : num_free(manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()) {
    manager.check_integrity();
    for (const SeqId seq_id : manager.get_seq_ids()) {
      const auto table = manager.get_block_table(seq_id);
      sequences[seq_id] = {
          {table.begin(), table.end()}, manager.get_num_tokens(seq_id), manager.get_device(seq_id)};
    }
  }
  friend bool operator==(const Snapshot&, const Snapshot&) = default;

  std::pair<std::int32_t, std::int32_t> num_free;
  std::map<SeqId, std::tuple<std::vector<BlockId>, std::int64_t, BlockDevice>> sequences;
};

// Three sequences that share a prompt with a part-filled last block, and one that stands alone.
class FailingAllocationTest : public ::testing::Test {
 protected:
  FailingAllocationTest()
      : manager_({.block_size = kBlockSize, .num_gpu_blocks = 64, .num_cpu_blocks = 64}) {
    manager_.allocate(std::vector{SeqId(1), SeqId(2), SeqId(3)}, 3 * kBlockSize + 1);
    manager_.allocate(std::vector{SeqId(4)}, 2 * kBlockSize);
  }

  // Returns how many allocations of `call` failed before it succeeded.
  template <class Call>
  int expect_unchanged_by_failures(Call call) {
    const Snapshot before(manager_);
    return fail_at_each_allocation(call, [&] { EXPECT_EQ(Snapshot(manager_), before); });
  }

  BlockSpaceManager manager_;
  const std::vector<SeqId> all_{SeqId(1), SeqId(2), SeqId(3), SeqId(4)};
};

TEST_F(FailingAllocationTest, AllocateChangesNothing) {
  const std::vector<SeqId> added{SeqId(5), SeqId(6)};
  EXPECT_GT(expect_unchanged_by_failures([&] { manager_.allocate(added, 5); }), 4);
  manager_.check_integrity();
  EXPECT_EQ(manager_.get_num_tokens(SeqId(6)), 5);
}

TEST_F(FailingAllocationTest, AppendSlotsChangesNothing) {
  std::vector<BlockCopy> copies;
  EXPECT_GT(expect_unchanged_by_failures([&] { copies = manager_.append_slots(all_, 6); }), 4);
  EXPECT_EQ(copies.size(), 2U);
  manager_.check_integrity();
  EXPECT_EQ(manager_.get_num_tokens(SeqId(4)), 2 * kBlockSize + 6);
}

TEST_F(FailingAllocationTest, ForkChangesNothing) {
  EXPECT_GT(expect_unchanged_by_failures([&] { manager_.fork(SeqId(1), SeqId(9)); }), 1);
  manager_.check_integrity();
  EXPECT_EQ(manager_.get_num_tokens(SeqId(9)), 3 * kBlockSize + 1);
}

TEST_F(FailingAllocationTest, SwapsChangeNothing) {
  std::vector<BlockCopy> copies;
  EXPECT_GT(expect_unchanged_by_failures([&] { copies = manager_.swap_out(all_); }), 3);
  EXPECT_EQ(copies.size(), 6U);
  manager_.check_integrity();
  EXPECT_EQ(manager_.get_device(SeqId(4)), BlockDevice::kCpu);
  EXPECT_GT(expect_unchanged_by_failures([&] { copies = manager_.swap_in(all_); }), 3);
  EXPECT_EQ(copies.size(), 6U);
  manager_.check_integrity();
  EXPECT_EQ(manager_.get_device(SeqId(4)), BlockDevice::kGpu);
}

TEST_F(FailingAllocationTest, GivingBackNeedsNoMemory) {
  EXPECT_EQ(expect_unchanged_by_failures([&] { manager_.free(SeqId(1)); }), 0);
  EXPECT_EQ(expect_unchanged_by_failures([&] { manager_.reset(); }), 0);
  EXPECT_EQ(manager_.get_num_free_gpu_blocks(), 63);
}

TEST(FailingAllocation, RowsOfABlockTableNeedNoMemory) {
  BlockTable table({.block_size = kBlockSize,
                    .max_num_reqs = 3,
                    .max_num_blocks_per_req = 4,
                    .max_num_batched_tokens = 8,
                    .kernel_block_size = 2});
  const std::vector<BlockId> blocks{BlockId(3), BlockId(5)};
  const auto change_rows = [&] {
    table.append_row(blocks, 0);
    table.add_row(blocks, 1);
    table.replace_blocks(blocks, 1, 0);
    table.move_row(0, 2);
    table.swap_row(1, 2);
    table.clear_row(1);
    table.mark_clean(3);
    table.clear();
  };
  EXPECT_EQ(fail_at_each_allocation(change_rows, [] {}), 0);
  table.check_integrity();
}

}  // namespace
}  // namespace paged_kv
