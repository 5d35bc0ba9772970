// SPDX-License-Identifier: Apache-2.0
//
// What emulation costs: prints the table of docs/testing.md. Not a test.
#include "paged_kv/cuda/launch.h"
#include "sample_kernels.cuh"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

namespace paged_kv::cuda::testing {
namespace {

constexpr int kNumThreads = 128;
constexpr int kNumRounds = 2000;

__global__ void barriers_kernel(int num_rounds) {
  for (int i = 0; i < num_rounds; ++i) __syncthreads();
}
__global__ void syncwarps_kernel(int num_rounds) {
  for (int i = 0; i < num_rounds; ++i) __syncwarp();
}
__global__ void shuffles_kernel(int num_rounds, int* out) {
  int value = static_cast<int>(threadIdx.x);
  for (int i = 0; i < num_rounds; ++i) value += __shfl_xor_sync(0xffffffffu, value, 1);
  out[threadIdx.x] = value;
}

// Best of five, in seconds.
template <class F>
double seconds(F run) {
  using Clock = std::chrono::steady_clock;
  double best = 1e9;
  for (int i = 0; i < 5; ++i) {
    const auto start = Clock::now();
    run();
    best = std::min(best, std::chrono::duration<double>(Clock::now() - start).count());
  }
  return best;
}

void report(const char* what, double total_seconds, double num_operations) {
  std::printf("| %s | %.1f | %.1f |\n", what, total_seconds / num_operations * 1e9,
              num_operations / total_seconds / 1e6);
}

void run_all() {
  constexpr double kOperations = double{kNumThreads} * kNumRounds;
  std::vector<int> out(kNumThreads);
  std::printf("| per thread | ns | million a second |\n|---|---|---|\n");
  report("`__syncthreads` (one switch)",
         seconds([] { launch(&barriers_kernel, 1, kNumThreads, 0, nullptr, kNumRounds); }),
         kOperations);
  report("`__syncwarp` (one switch)",
         seconds([] { launch(&syncwarps_kernel, 1, kNumThreads, 0, nullptr, kNumRounds); }),
         kOperations);
  report("`__shfl_xor_sync` (one switch)", seconds([&] {
           launch(&shuffles_kernel, 1, kNumThreads, 0, nullptr, kNumRounds, out.data());
         }),
         kOperations);
  report("start and end of a thread",
         seconds([] { launch(&barriers_kernel, kNumRounds, kNumThreads, 0, nullptr, 0); }),
         kOperations);
  constexpr int kRowLen = 512, kNumRows = 64;
  const std::vector<Half> in(kRowLen * kNumRows, from_float<Half>(1.0f));
  std::vector<Half> softmax(in.size());
  report("element of a half softmax, rows of 512", seconds([&] {
           launch(&row_softmax_kernel<Half>, kNumRows, kNumThreads, kRowLen * sizeof(float),
                  nullptr, in.data(), softmax.data(), kRowLen);
         }),
         double{kRowLen} * kNumRows);
}

}  // namespace
}  // namespace paged_kv::cuda::testing

int main() { paged_kv::cuda::testing::run_all(); }
