// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/cuda/shared.cuh"
#include "test_support.h"

#include <array>
#include <cstdint>
#include <string>

#include <gtest/gtest.h>

namespace paged_kv::cuda::testing {
namespace {

struct TagA;
struct TagB;

__global__ void addresses_kernel(std::array<const void*, 4>* out) {
  (*out)[0] = &static_shared<int[8], TagA>();
  (*out)[1] = &static_shared<int[8], TagB>();
  (*out)[2] = &static_shared<int[8], TagA>();
  (*out)[3] = dynamic_shared<uint4>();
}

TEST(SharedMemory, OneArrayPerTypeAndTag) {
  std::array<const void*, 4> addresses{};
  launch(&addresses_kernel, 1, 1, 64, nullptr, &addresses);
  EXPECT_NE(addresses[0], addresses[1]);
  EXPECT_EQ(addresses[0], addresses[2]);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(addresses[3]) % 128, 0u);
}

// Each block finds poison, whatever the block before left.
__global__ void poison_kernel(int* num_poisoned) {
  auto& values = static_shared<std::uint16_t[64]>();
  auto* more = dynamic_shared<std::uint16_t>();
  if (values[threadIdx.x] == 0xffff && more[threadIdx.x] == 0xffff) {
    atomicAdd(num_poisoned, 1);
  }
  values[threadIdx.x] = 0;
  more[threadIdx.x] = 0;
}

TEST(SharedMemory, IsPoisonedBeforeEachBlock) {
  int num_poisoned = 0;
  launch(&poison_kernel, 3, 64, 128, nullptr, &num_poisoned);
  EXPECT_EQ(num_poisoned, 3 * 64);
}

__global__ void too_much_static_kernel() { static_shared<char[48 * 1024 + 1]>()[0] = 0; }
__global__ void much_static_kernel() { static_shared<char[40 * 1024]>()[0] = 0; }

TEST(SharedMemory, LimitsAreTheDevices) {
  EXPECT_NE(
      error_of(&too_much_static_kernel, 1, 1).find("too much shared memory: 49153 bytes static"),
      std::string::npos);
  launch(&much_static_kernel, 1, 1, 187 * 1024, nullptr);
  EXPECT_THROW(launch(&much_static_kernel, 1, 1, 188 * 1024, nullptr), simt::KernelError);
}

}  // namespace
}  // namespace paged_kv::cuda::testing
