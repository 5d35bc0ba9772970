// SPDX-License-Identifier: Apache-2.0
//
// Bugs that AddressSanitizer or UBSan find in a kernel, at the line of the access.
#if defined(__SANITIZE_ADDRESS__)

#include "planted_bugs.cuh"
#include "test_support.h"

#include <array>
#include <cstdint>
#include <memory>

#include <gtest/gtest.h>

namespace paged_kv::cuda::testing {
namespace {

TEST(MemoryErrors, AccessPastASharedArray) {
  std::array<int, 32> out{};
  launch(&shift_in_shared_kernel<unsigned>, 1, 32, 0, nullptr, 0u, out.data());
  EXPECT_DEATH(launch(&shift_in_shared_kernel<unsigned>, 1, 32, 0, nullptr, 1u, out.data()),
               "use-after-poison");
}

TEST(MemoryErrors, IndexPastASharedArray) {
  std::array<int, 32> out{};
  launch(&shift_in_shared_array_kernel<unsigned>, 1, 32, 0, nullptr, 0u, out.data());
  EXPECT_DEATH(launch(&shift_in_shared_array_kernel<unsigned>, 1, 32, 0, nullptr, 1u, out.data()),
               "index 32 out of bounds for type 'int \\[32\\]'");
}

TEST(MemoryErrors, AccessPastDynamicSharedMemory) {
  launch(&fill_dynamic_shared_kernel<int>, 1, 1, 40, nullptr, 10);
  EXPECT_DEATH(launch(&fill_dynamic_shared_kernel<int>, 1, 1, 40, nullptr, 11), "use-after-poison");
}

// Bug in the data: a table entry beyond the cache. Grid: 1. Block: (32).
__global__ void gather_block_kernel(const float* cache, const int* block_table, float* out) {
  const std::int64_t block_id = __ldg(block_table);
  out[threadIdx.x] = cache[block_id * 32 + threadIdx.x];
}

TEST(MemoryErrors, BlockTableEntryBeyondTheCache) {
  constexpr int kNumBlocks = 4;
  const auto cache = std::make_unique<float[]>(kNumBlocks * 32);
  std::array<float, 32> out{};
  int block_table = kNumBlocks - 1;
  launch(&gather_block_kernel, 1, 32, 0, nullptr, cache.get(), &block_table, out.data());
  block_table = kNumBlocks;
  EXPECT_DEATH(
      launch(&gather_block_kernel, 1, 32, 0, nullptr, cache.get(), &block_table, out.data()),
      "heap-buffer-overflow");
}

__global__ void local_array_kernel(unsigned index, int* out) {
  volatile int values[4] = {1, 2, 3, 4};
  const volatile int* elements = values;
  __syncthreads();  // ASan must know the thread's stack again after the switch
  out[threadIdx.x] = elements[index];
}

TEST(MemoryErrors, AccessPastALocalArray) {
  std::array<int, 32> out{};
  launch(&local_array_kernel, 1, 32, 0, nullptr, 3u, out.data());
  EXPECT_DEATH(launch(&local_array_kernel, 1, 32, 0, nullptr, 4u, out.data()),
               "stack-buffer-overflow");
}

__global__ void misaligned_load_kernel(const unsigned char* bytes, uint4* out) {
  *out = *reinterpret_cast<const uint4*>(bytes);
}

TEST(MemoryErrors, MisalignedVectorLoad) {
  alignas(16) std::array<unsigned char, 32> bytes{};
  uint4 out{};
  launch(&misaligned_load_kernel, 1, 1, 0, nullptr, bytes.data(), &out);
  EXPECT_DEATH(launch(&misaligned_load_kernel, 1, 1, 0, nullptr, bytes.data() + 4, &out),
               "misaligned address");
}

// A launch that failed leaves threads behind in the middle of their frames: the next one must not
// trip over them.
TEST(MemoryErrors, NoFalseReportAfterAnAbandonedBlock) {
  std::array<int, 64> out{};
  EXPECT_NE(error_of(&barrier_in_branches_kernel<false>, 1, 64, out.data()), "");
  EXPECT_EQ(error_of(&local_array_kernel, 4, 64, 3u, out.data()), "");
}

}  // namespace
}  // namespace paged_kv::cuda::testing

#endif  // defined(__SANITIZE_ADDRESS__)
