// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/cuda/ptx.cuh"

#include <cmath>

#include <cuda_runtime.h>

#include <gtest/gtest.h>

namespace {

TEST(Math, BitFunctions) {
  EXPECT_EQ(__byte_perm(0x33221100u, 0x77665544u, 0x7531u), 0x77553311u);
  EXPECT_EQ(__byte_perm(0x33221100u, 0x77665544u, 0x3210u), 0x33221100u);
  EXPECT_EQ(__brev(1u), 0x80000000u);
  EXPECT_EQ(__clz(0), 32);
  EXPECT_EQ(__clz(1), 31);
  EXPECT_EQ(__ffs(0), 0);
  EXPECT_EQ(__ffs(8), 4);
  EXPECT_EQ(__popc(0xf0f0u), 8);
  EXPECT_EQ(__umulhi(0x80000000u, 6u), 3u);
  EXPECT_EQ(__funnelshift_l(0x80000000u, 1u, 1u), 3u);
  EXPECT_EQ(__funnelshift_r(0x80000000u, 1u, 31u), 3u);
  EXPECT_EQ(__float_as_uint(1.0f), 0x3f800000u);
}

TEST(Math, FastFunctionsAreCloseToTheExactOnes) {
  for (float x = -20.0f; x <= 20.0f; x += 0.37f) {
    EXPECT_NEAR(__expf(x) / std::exp(double{x}), 1.0, 4e-6) << x;
    EXPECT_NEAR(paged_kv::cuda::ptx::exp2_approx(x) / std::exp2(double{x}), 1.0, 3e-7) << x;
  }
  EXPECT_EQ(paged_kv::cuda::ptx::exp2_approx(-INFINITY), 0.0f);
  EXPECT_EQ(paged_kv::cuda::ptx::exp2_approx(-127.0f), 0.0f);  // subnormals are flushed
  EXPECT_EQ(__expf(-INFINITY), 0.0f);
}

// CUDA's documented exception, which has bitten softmax kernels.
TEST(Math, FastDivisionByAHugeNumberIsZero) {
  EXPECT_EQ(__fdividef(6.0f, 3.0f), 2.0f);
  EXPECT_EQ(__fdividef(0x1p127f, 0x1.8p126f), 0.0f);
  EXPECT_NE(0x1p127f / 0x1.8p126f, 0.0f);
}

TEST(Math, MinAndMaxTakeBothTypes) {
  EXPECT_EQ(min(3, 5), 3);
  EXPECT_EQ(max(3u, 5u), 5u);
  EXPECT_EQ(max(2.5f, 1.0f), 2.5f);
}

}  // namespace
