// SPDX-License-Identifier: Apache-2.0
//
// Races that ThreadSanitizer finds between emulated threads, which all run on one OS thread: each
// is a fiber that TSan knows, a switch orders nothing, and only what orders threads on the device
// tells TSan so (barriers, __syncwarp, fences with atomics).
#if defined(__SANITIZE_THREAD__)

#include "planted_bugs.cuh"
#include "test_support.h"

#include <array>

#include <gtest/gtest.h>

namespace paged_kv::cuda::testing {
namespace {

// Races under three schedules that differ most. What is ordered does not depend on who runs first,
// but with the copies of cp.async.
template <class F>
int num_races(F run) {
  using enum simt::ThreadOrder;
  using enum simt::AsyncCopyMode;
  (void)take_race_reports();
  for (const simt::Options& schedule : {simt::Options{.order = kFifo, .async_copy = kLate},
                                        simt::Options{.order = kLifo, .async_copy = kEager},
                                        simt::Options{.order = kRandom, .async_copy = kLate}}) {
    const simt::ScopedOptions scope(schedule);
    run();
  }
  return take_race_reports();
}

template <class... Params, class... Args>
int num_races_in(void (*kernel)(Params...), dim3 grid, dim3 block, Args... args) {
  return num_races([&] { launch(kernel, grid, block, 0, nullptr, args...); });
}

TEST(Races, MissingBarrierBeforeTheMerge) {
  float out = 0;
  EXPECT_EQ(num_races_in(&merge_partial_sums_kernel<true>, 1, 128, &out), 0);
  EXPECT_GT(num_races_in(&merge_partial_sums_kernel<false>, 1, 128, &out), 0);
}

TEST(Races, MissingBarrierAtLoopEnd) {
  std::array<uint4, kPipelineTiles * kPipelineThreads> in{};
  std::array<unsigned, kPipelineThreads> out{};
  EXPECT_EQ(num_races_in(&pipeline_kernel<PipelineBug::kNone>, 1, kPipelineThreads, in.data(),
                         out.data()),
            0);
  EXPECT_GT(num_races_in(&pipeline_kernel<PipelineBug::kNoBarrierAtLoopEnd>, 1, kPipelineThreads,
                         in.data(), out.data()),
            0);
}

TEST(Races, MissingSyncwarp) {
  std::array<int, 32> out{};
  EXPECT_EQ(num_races_in(&read_neighbour_kernel<true>, 1, 32, out.data()), 0);
  EXPECT_GT(num_races_in(&read_neighbour_kernel<false>, 1, 32, out.data()), 0);
}

// A shuffle synchronises lanes but orders no memory.
__global__ void shuffle_instead_of_syncwarp_kernel(int* out) {
  auto& values = static_shared<int[32]>();
  values[threadIdx.x] = 1;
  (void)__shfl_sync(kFullMask, 0, 0);
  out[threadIdx.x] = values[threadIdx.x ^ 1u];
}

TEST(Races, AShuffleIsNoFence) {
  std::array<int, 32> out{};
  EXPECT_GT(num_races_in(&shuffle_instead_of_syncwarp_kernel, 1, 32, out.data()), 0);
}

// __syncwarp orders the lanes of its mask, not those of another one.
__global__ void syncwarp_of_halves_kernel(int* out, unsigned distance) {
  auto& values = static_shared<int[32]>();
  values[threadIdx.x] = 1;
  __syncwarp(threadIdx.x < 16 ? 0x0000ffffu : 0xffff0000u);
  out[threadIdx.x] = values[threadIdx.x ^ distance];
}

TEST(Races, SyncwarpOrdersTheLanesOfItsMaskOnly) {
  std::array<int, 32> out{};
  EXPECT_EQ(num_races_in(&syncwarp_of_halves_kernel, 1, 32, out.data(), 8u), 0);
  EXPECT_GT(num_races_in(&syncwarp_of_halves_kernel, 1, 32, out.data(), 16u), 0);
}

// A thread that runs ahead to the next barrier must not be ordered with those that are still
// behind the last one.
__global__ void write_after_barrier_kernel(int* out) {
  auto& value = static_shared<int>();
  __syncthreads();
  if (threadIdx.x == 0) value = 1;
  if (threadIdx.x == 63) *out = value;
  __syncthreads();
}

TEST(Races, BetweenTwoBarriers) {
  int out = 0;
  EXPECT_GT(num_races_in(&write_after_barrier_kernel, 1, 64, &out), 0);
}

TEST(Races, TwoBlocksWriteOneWord) {
  int count = 0;
  EXPECT_EQ(num_races_in(&count_blocks_kernel<true>, 8, 2, &count), 0);
  EXPECT_GT(num_races_in(&count_blocks_kernel<false>, 8, 2, &count), 0);
}

// Blocks far apart reuse the same fibers' stacks and shared memory: neither may order or race them.
__global__ void first_and_last_block_kernel(int* out) {
  auto& value = static_shared<int>();
  if (threadIdx.x == 0) value = static_cast<int>(blockIdx.x);
  __syncthreads();
  const bool writes = blockIdx.x == 0 || blockIdx.x + 1 == gridDim.x;
  if (threadIdx.x == 0 && writes) *out = value;
}

TEST(Races, BlocksFarApart) {
  int out = 0;
  EXPECT_EQ(num_races_in(&first_and_last_block_kernel, 1, 1, &out), 0);
  EXPECT_GT(num_races_in(&first_and_last_block_kernel, 40, 1, &out), 0);
}

TEST(Races, LastBlockNeedsFences) {
  std::array<int, 8> partial{};
  unsigned num_done = 0;
  int out = 0;
  EXPECT_EQ(num_races_in(&last_block_sums_kernel<true>, 8, 2, partial.data(), &num_done, &out), 0);
  EXPECT_EQ(out, 28);
  EXPECT_GT(num_races_in(&last_block_sums_kernel<false>, 8, 2, partial.data(), &num_done, &out), 0);
}

// Launches of one stream are ordered, and the host after them.
TEST(Races, LaunchesAreOrdered) {
  std::array<int, 32> out{};
  EXPECT_EQ(num_races([&] {
              launch(&read_neighbour_kernel<true>, 1, 32, 0, nullptr, out.data());
              launch(&read_neighbour_kernel<true>, 1, 32, 0, nullptr, out.data());
              out.fill(0);
            }),
            0);
}

TEST(Races, NoneAfterAnAbandonedBlock) {
  std::array<int, 64> out{};
  EXPECT_EQ(num_races([&] {
              EXPECT_NE(error_of(&barrier_in_branches_kernel<false>, 1, 64, out.data()), "");
              EXPECT_EQ(error_of(&barrier_in_branches_kernel<true>, 1, 64, out.data()), "");
            }),
            0);
}

}  // namespace
}  // namespace paged_kv::cuda::testing

#endif  // defined(__SANITIZE_THREAD__)
