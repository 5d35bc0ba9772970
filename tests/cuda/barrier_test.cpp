// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/cuda/shared.cuh"
#include "test_support.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

namespace paged_kv::cuda::testing {
namespace {

__global__ void votes_kernel(int* count, int* all, int* any) {
  const bool odd = threadIdx.x % 2 == 1;
  count[threadIdx.x] = __syncthreads_count(odd);
  all[threadIdx.x] = __syncthreads_and(threadIdx.x < 40);
  any[threadIdx.x] = __syncthreads_or(threadIdx.x == 39);
}

TEST(Barrier, VotesReachEveryThread) {
  for (const simt::Options& schedule : simt::all_schedules()) {
    const simt::ScopedOptions scope(schedule);
    std::array<int, 40> count{}, all{}, any{};
    launch(&votes_kernel, 1, 40, 0, nullptr, count.data(), all.data(), any.data());
    for (std::size_t i = 0; i < 40; ++i) {
      EXPECT_EQ(count[i], 20);
      EXPECT_EQ(all[i], 1);
      EXPECT_EQ(any[i], 1);
    }
  }
}

// Each round, every thread reads what its neighbour wrote in the round before.
__global__ void ring_kernel(int num_rounds, int* out) {
  auto& values = static_shared<int[2][96]>();
  values[0][threadIdx.x] = static_cast<int>(threadIdx.x);
  for (int round = 0; round < num_rounds; ++round) {
    __syncthreads();
    values[(round + 1) % 2][threadIdx.x] = values[round % 2][(threadIdx.x + 1) % blockDim.x];
  }
  out[threadIdx.x] = values[num_rounds % 2][threadIdx.x];
}

TEST(Barrier, ManyRoundsInEveryOrder) {
  std::array<int, 96> expected{};
  for (int i = 0; i < 96; ++i) expected[static_cast<std::size_t>(i)] = (i + 10) % 96;
  const auto results = results_by_schedule([] {
    std::array<int, 96> out{};
    launch(&ring_kernel, 1, 96, 0, nullptr, 10, out.data());
    return out;
  });
  for (const auto& out : results) EXPECT_EQ(out, expected);
}

__global__ void early_return_kernel(int* count) {
  if (threadIdx.x >= 40) return;
  const int others = __syncthreads_count(1);
  if (threadIdx.x == 0) *count = others;
}

TEST(Barrier, ThreadsThatHaveReturnedDoNotCount) {
  const auto results = results_by_schedule([] {
    int count = 0;
    launch(&early_return_kernel, 1, 64, 0, nullptr, &count);
    return count;
  });
  for (const int count : results) EXPECT_EQ(count, 40);
}

using Indices = std::array<unsigned, 6>;

// Where each thread was in the order of all: blockIdx and threadIdx.
__global__ void indices_kernel(int* num_seen, Indices* seen) {
  seen[atomicAdd(num_seen, 1)] = {blockIdx.x,  blockIdx.y,  blockIdx.z,
                                  threadIdx.x, threadIdx.y, threadIdx.z};
}

std::vector<Indices> order_of_threads(dim3 grid, dim3 block, const simt::Options& schedule) {
  const simt::ScopedOptions scope(schedule);
  std::vector<Indices> seen(grid.x * grid.y * grid.z * block.x * block.y * block.z);
  int num_seen = 0;
  launch(&indices_kernel, grid, block, 0, nullptr, &num_seen, seen.data());
  EXPECT_EQ(num_seen, static_cast<int>(seen.size()));
  return seen;
}

// x runs fastest, in blocks and in threads.
TEST(Launch, EveryThreadOfEveryBlockOnce) {
  const auto seen = order_of_threads(dim3(3, 2, 2), dim3(4, 3, 2), {});
  for (std::size_t i = 0; i < seen.size(); ++i) {
    const auto thread = static_cast<unsigned>(i % 24);
    const auto block_index = static_cast<unsigned>(i / 24);
    EXPECT_EQ(seen[i], (Indices{block_index % 3, block_index / 3 % 2, block_index / 6, thread % 4,
                                thread / 4 % 3, thread / 12}));
  }
}

TEST(Launch, OrdersDifferAndSeedsRepeat) {
  const auto order_of = [](simt::ThreadOrder order, std::uint64_t seed) {
    return order_of_threads(5, 8, {.order = order, .seed = seed});
  };
  using enum simt::ThreadOrder;
  auto reversed = order_of(kLifo, 1);
  std::reverse(reversed.begin(), reversed.end());
  EXPECT_EQ(reversed, order_of(kFifo, 1));
  EXPECT_EQ(order_of(kRandom, 1), order_of(kRandom, 1));
  EXPECT_NE(order_of(kRandom, 1), order_of(kRandom, 2));
}

}  // namespace
}  // namespace paged_kv::cuda::testing
