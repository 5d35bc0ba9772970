// SPDX-License-Identifier: Apache-2.0
//
// Bugs that a plain run of the emulator finds: each next to its correct twin. Those that only a
// sanitizer sees are in memory_errors_test.cpp and races_test.cpp.
#include "planted_bugs.cuh"
#include "test_support.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace paged_kv::cuda::testing {
namespace {

// The report names the reason, the place in the kernel, and what each thread does.
void expect_report(const std::string& report, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    EXPECT_NE(report.find(part), std::string::npos) << "missing: " << part << "\nin: " << report;
  }
}

TEST(Catches, ThreadsWaitingForDifferentThingsAreADeadlock) {
  std::array<int, 64> out{};
  EXPECT_EQ(error_of(&shuffle_or_barrier_kernel<true>, 1, 64, out.data()), "");
  const std::string report = error_of(&shuffle_or_barrier_kernel<false>, 1, 64, out.data());
  expect_report(
      report, {"deadlock", "block (0,0,0)", "order=fifo", "threads 0..2: wait in __syncthreads",
               "tests/cuda/planted_bugs.cuh:", "threads 3..3: wait in __shfl_sync mask 0xffffffff",
               "threads 4..63: wait in __syncthreads", "shuffle_or_barrier_kernel"});
}

TEST(Catches, DivergentBarrierNamesBothLines) {
  std::array<int, 64> out{};
  EXPECT_EQ(error_of(&barrier_in_branches_kernel<true>, 1, 64, out.data()), "");
  const std::string report = error_of(&barrier_in_branches_kernel<false>, 1, 64, out.data());
  expect_report(report, {"divergent __syncthreads: thread 16 is at __syncthreads",
                         "others wait at __syncthreads", "threads 0..15: wait in __syncthreads"});
}

// clang-format off
__global__ void barriers_on_one_line_kernel() {
  if (threadIdx.x < 16) { __syncthreads(); } else { __syncthreads(); }
}
// clang-format on

TEST(Catches, DivergentBarrierOnOneLine) {
  expect_report(error_of(&barriers_on_one_line_kernel, 1, 64), {"divergent __syncthreads"});
}

TEST(Catches, LanesOfOneWarpInDifferentShuffles) {
  std::array<int, 32> out{};
  EXPECT_EQ(error_of(&shuffle_in_branches_kernel<true>, 1, 32, out.data()), "");
  const std::string report = error_of(&shuffle_in_branches_kernel<false>, 1, 32, out.data());
  expect_report(report, {"lanes of one warp meet in different calls: lane 0 in __shfl_sync",
                         "lane 16 in __shfl_sync"});
}

TEST(Catches, MaskThatLeavesTheCallerOut) {
  std::array<int, 32> out{};
  EXPECT_EQ(error_of(&half_warp_sum_kernel<true>, 1, 32, out.data()), "");
  EXPECT_EQ(out[0], 120);
  EXPECT_EQ(out[31], 376);
  const std::string report = error_of(&half_warp_sum_kernel<false>, 1, 32, out.data());
  expect_report(report, {"lane 16 calls __shfl_sync with a mask that leaves it out"});
}

TEST(Catches, ShuffleReadsALaneThatHasReturned) {
  std::array<int, 32> out{};
  EXPECT_EQ(error_of(&return_before_shuffle_kernel<true>, 1, 32, out.data()), "");
  const std::string report = error_of(&return_before_shuffle_kernel<false>, 1, 32, out.data());
  expect_report(report, {"lane 4 reads lane 5", "has returned", "threads 5..5: returned"});
}

TEST(Catches, LanesThatWaitForDifferentMasksAreADeadlock) {
  EXPECT_EQ(error_of(&different_masks_kernel<true>, 1, 32), "");
  expect_report(error_of(&different_masks_kernel<false>, 1, 32),
                {"deadlock", "threads 0..15: wait in __syncwarp mask 0x1ffff",
                 "threads 16..31: wait in __syncwarp mask 0xffffffff"});
}

// Under TSan, what follows is a race (races_test.cpp), or a wrong value there too.
#if !defined(__SANITIZE_THREAD__)

TEST(Catches, MissingBarrierBeforeTheMerge) {
  const auto run = [](auto kernel) {
    return results_by_schedule([&] {
      float out = 0;
      launch(kernel, 1, 128, 0, nullptr, &out);
      return out;
    });
  };
  for (const float sum : run(&merge_partial_sums_kernel<true>)) EXPECT_EQ(sum, 127 * 128 / 2);
  const std::vector<float> sums = run(&merge_partial_sums_kernel<false>);
  EXPECT_TRUE(std::isnan(sums.front()));  // first in, first out: thread 0 comes too early
}

class PipelineCatches : public ::testing::Test {
 protected:
  using Sums = std::array<unsigned, kPipelineThreads>;

  PipelineCatches() {
    for (unsigned i = 0; i < in_.size(); ++i) in_[i] = {i, 0, 0, 0};
    for (unsigned thread = 0; thread < kPipelineThreads; ++thread) {
      for (unsigned tile = 0; tile < kPipelineTiles; ++tile) {
        expected_[thread] += tile * kPipelineThreads + (thread + 1) % kPipelineThreads;
      }
    }
  }

  // Which of the schedules with `mode` give the right sums.
  template <class Kernel>
  std::vector<bool> correct_in(simt::AsyncCopyMode mode, Kernel kernel) {
    std::vector<bool> correct;
    for (const simt::Options& schedule : simt::all_schedules()) {
      if (schedule.async_copy != mode) continue;
      const simt::ScopedOptions scope(schedule);
      Sums sums{};
      launch(kernel, 1, kPipelineThreads, 0, nullptr, in_.data(), sums.data());
      correct.push_back(sums == expected_);
    }
    return correct;
  }

  std::array<uint4, kPipelineTiles * kPipelineThreads> in_{};
  Sums expected_{};
};

TEST_F(PipelineCatches, CorrectTwin) {
  for (const auto mode : {simt::AsyncCopyMode::kLate, simt::AsyncCopyMode::kEager}) {
    for (const bool correct : correct_in(mode, &pipeline_kernel<PipelineBug::kNone>)) {
      EXPECT_TRUE(correct);
    }
  }
}

TEST_F(PipelineCatches, MissingWaitInTheLateMode) {
  const auto kernel = &pipeline_kernel<PipelineBug::kNoWait>;
  for (const bool correct : correct_in(simt::AsyncCopyMode::kLate, kernel)) EXPECT_FALSE(correct);
}

TEST_F(PipelineCatches, MissingBarrierAtLoopEndInTheEagerMode) {
  const auto kernel = &pipeline_kernel<PipelineBug::kNoBarrierAtLoopEnd>;
  const std::vector<bool> correct = correct_in(simt::AsyncCopyMode::kEager, kernel);
  EXPECT_FALSE(std::all_of(correct.begin(), correct.end(), std::identity{}));
}

TEST(Catches, MissingSyncwarp) {
  const auto run = [](auto kernel) {
    return results_by_schedule([&] {
      std::array<int, 32> out{};
      launch(kernel, 1, 32, 0, nullptr, out.data());
      return out;
    });
  };
  std::array<int, 32> expected{};
  for (int lane = 0; lane < 32; ++lane) expected[static_cast<std::size_t>(lane)] = lane ^ 1;
  for (const auto& values : run(&read_neighbour_kernel<true>)) EXPECT_EQ(values, expected);
  EXPECT_EQ(run(&read_neighbour_kernel<false>).front()[0], -1);  // poison
}

TEST(Catches, UninitialisedSharedMemoryIsNotANumber) {
  std::array<float, 64> out{};
  launch(&partly_written_kernel<float, true>, 1, 64, 0, nullptr, out.data());
  EXPECT_EQ(out[63], 0.0f);
  launch(&partly_written_kernel<float, false>, 1, 64, 0, nullptr, out.data());
  EXPECT_EQ(out[62], 0.0f);
  EXPECT_TRUE(std::isnan(out[63]));
  std::array<int, 64> ints{};
  launch(&partly_written_kernel<int, false>, 1, 64, 0, nullptr, ints.data());
  EXPECT_EQ(ints[63], -1);
}

#endif  // !defined(__SANITIZE_THREAD__)

// ASan stops at the access itself: memory_errors_test.cpp.
#if !defined(__SANITIZE_ADDRESS__)

TEST(Catches, WritePastASharedArray) {
  std::array<int, 32> out{};
  EXPECT_EQ(error_of(&shift_in_shared_kernel<unsigned>, 1, 32, 0u, out.data()), "");
  expect_report(
      error_of(&shift_in_shared_kernel<unsigned>, 1, 32, 1u, out.data()),
      {"shared memory was written 1 bytes past the end of", "int [32]", "planted_bugs.cuh:"});
}

TEST(Catches, WritePastDynamicSharedMemory) {
  launch(&fill_dynamic_shared_kernel<int>, 1, 1, 40, nullptr, 10);
  EXPECT_THROW(launch(&fill_dynamic_shared_kernel<int>, 1, 1, 40, nullptr, 11), simt::KernelError);
}

#endif  // !defined(__SANITIZE_ADDRESS__)

}  // namespace
}  // namespace paged_kv::cuda::testing
