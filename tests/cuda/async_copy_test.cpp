// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/cuda/ptx.cuh"
#include "paged_kv/cuda/shared.cuh"
#include "test_support.h"

#include <array>

#include <gtest/gtest.h>

namespace paged_kv::cuda::testing {
namespace {

// Three groups; out[i]: what the first word of group 0..2 reads with at most `2 - i` groups
// pending.
__global__ void waits_kernel(const uint4* in, std::array<std::array<unsigned, 3>, 3>* out) {
  auto& stages = static_shared<uint4[3]>();
  for (int i = 0; i < 3; ++i) {
    ptx::cp_async_16(&stages[i], in + i);
    ptx::cp_async_commit();
  }
  const auto look = [&] { return std::array{stages[0].x, stages[1].x, stages[2].x}; };
  ptx::cp_async_wait<2>();
  (*out)[0] = look();
  ptx::cp_async_wait<1>();
  (*out)[1] = look();
  ptx::cp_async_wait<0>();
  (*out)[2] = look();
}

TEST(AsyncCopy, LateModeCompletesOldestGroupsAtTheirWait) {
  constexpr unsigned kPoison = 0xffffffffu;
  const std::array<uint4, 3> in{{{10, 0, 0, 0}, {11, 0, 0, 0}, {12, 0, 0, 0}}};
  std::array<std::array<unsigned, 3>, 3> out{};
  launch(&waits_kernel, 1, 1, 0, nullptr, in.data(), &out);
  EXPECT_EQ(out[0], (std::array<unsigned, 3>{10, kPoison, kPoison}));
  EXPECT_EQ(out[1], (std::array<unsigned, 3>{10, 11, kPoison}));
  EXPECT_EQ(out[2], (std::array<unsigned, 3>{10, 11, 12}));
}

TEST(AsyncCopy, EagerModeCompletesAtOnce) {
  const simt::ScopedOptions scope({.async_copy = simt::AsyncCopyMode::kEager});
  const std::array<uint4, 3> in{{{10, 0, 0, 0}, {11, 0, 0, 0}, {12, 0, 0, 0}}};
  std::array<std::array<unsigned, 3>, 3> out{};
  launch(&waits_kernel, 1, 1, 0, nullptr, in.data(), &out);
  EXPECT_EQ(out[0], (std::array<unsigned, 3>{10, 11, 12}));
}

__global__ void partial_copy_kernel(const unsigned* in, int num_src_bytes, uint4* out) {
  auto& stage = static_shared<uint4>();
  ptx::cp_async_16(&stage, in, num_src_bytes);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  *out = stage;
}

TEST(AsyncCopy, BytesBeyondTheSourceAreZeroAndNotRead) {
  alignas(16) const std::array<unsigned, 2> in{1, 2};  // a read of 16 bytes would overrun it
  uint4 out{};
  launch(&partial_copy_kernel, 1, 1, 0, nullptr, in.data(), 8, &out);
  EXPECT_EQ(out.x, 1u);
  EXPECT_EQ(out.y, 2u);
  EXPECT_EQ(out.z, 0u);
  EXPECT_EQ(out.w, 0u);
}

TEST(AsyncCopy, RefusesMisalignedAddresses) {
  alignas(16) const std::array<unsigned, 8> in{};
  uint4 out{};
  const std::string report = error_of(&partial_copy_kernel, 1, 1, in.data() + 1, 16, &out);
  EXPECT_NE(report.find("cp.async of 16 bytes between misaligned addresses"), std::string::npos);
}

}  // namespace
}  // namespace paged_kv::cuda::testing
