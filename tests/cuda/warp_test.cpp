// SPDX-License-Identifier: Apache-2.0
#include "test_support.h"

#include <array>
#include <cstdint>
#include <functional>
#include <string>

#include <cuda_fp16.h>

#include <gtest/gtest.h>

namespace paged_kv::cuda::testing {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
using Lanes = std::array<int, 32>;

// body(lane) of each lane of one warp.
template <class Body>
__global__ void per_lane_kernel(Body body, int* out) {
  out[threadIdx.x] = body(static_cast<int>(threadIdx.x));
}
template <class Body>
Lanes per_lane(Body body) {
  Lanes out{};
  launch(&per_lane_kernel<Body>, 1, 32, 0, nullptr, body, out.data());
  return out;
}

Lanes expected(const std::function<int(int)>& value) {
  Lanes lanes{};
  for (int lane = 0; lane < 32; ++lane) lanes[static_cast<std::size_t>(lane)] = value(lane);
  return lanes;
}

TEST(Warp, ShuffleByIndexWrapsInItsSegment) {
  EXPECT_EQ(per_lane([](int lane) { return __shfl_sync(kAllLanes, lane, 5); }),
            expected([](int) { return 5; }));
  EXPECT_EQ(per_lane([](int lane) { return __shfl_sync(kAllLanes, lane, 11, 8); }),
            expected([](int lane) { return lane / 8 * 8 + 3; }));
}

TEST(Warp, ShuffleUpAndDownStopAtTheSegment) {
  EXPECT_EQ(per_lane([](int lane) { return __shfl_up_sync(kAllLanes, lane, 3); }),
            expected([](int lane) { return lane < 3 ? lane : lane - 3; }));
  EXPECT_EQ(per_lane([](int lane) { return __shfl_down_sync(kAllLanes, lane, 3, 8); }),
            expected([](int lane) { return lane % 8 < 5 ? lane + 3 : lane; }));
  EXPECT_EQ(per_lane([](int lane) { return __shfl_down_sync(kAllLanes, lane, 40); }),
            expected([](int lane) { return lane; }));
}

// Across segments, only earlier ones can be read.
TEST(Warp, ShuffleXor) {
  EXPECT_EQ(per_lane([](int lane) { return __shfl_xor_sync(kAllLanes, lane, 21); }),
            expected([](int lane) { return lane ^ 21; }));
  EXPECT_EQ(per_lane([](int lane) { return __shfl_xor_sync(kAllLanes, lane, 8, 8); }),
            expected([](int lane) { return lane % 16 < 8 ? lane : lane - 8; }));
}

TEST(Warp, ShuffleCarriesWideAndHalfTypes) {
  EXPECT_EQ(
      per_lane([](int lane) {
        const std::int64_t wide = (std::int64_t{1} << 40) + lane;
        return static_cast<int>(__shfl_xor_sync(kAllLanes, wide, 1) - (std::int64_t{1} << 40));
      }),
      expected([](int lane) { return lane ^ 1; }));
  EXPECT_EQ(per_lane([](int lane) {
              const __half half(static_cast<float>(lane));
              return static_cast<int>(__half2float(__shfl_xor_sync(kAllLanes, half, 1)));
            }),
            expected([](int lane) { return lane ^ 1; }));
}

TEST(Warp, ShuffleWidthMustBeAPowerOfTwo) {
  const auto body = [](int lane) { return __shfl_sync(kAllLanes, lane, 0, 24); };
  EXPECT_THROW((void)per_lane(body), simt::KernelError);
}

TEST(Warp, Votes) {
  EXPECT_EQ(per_lane([](int lane) { return static_cast<int>(__ballot_sync(kAllLanes, lane < 4)); }),
            expected([](int) { return 0xf; }));
  EXPECT_EQ(per_lane([](int lane) {
              return __any_sync(kAllLanes, lane == 31) + 2 * __all_sync(kAllLanes, lane < 31) +
                     4 * __all_sync(kAllLanes, lane < 32) + 8 * __any_sync(kAllLanes, lane > 31);
            }),
            expected([](int) { return 1 + 4; }));
}

// Two groups of lanes of one warp vote apart, and a different number of times.
TEST(Warp, GroupsOfLanesDoNotMeet) {
  EXPECT_EQ(per_lane([](int lane) {
              const unsigned mask = lane < 8 ? 0x000000ffu : 0xffffff00u;
              int count = 0;
              for (int round = 0; round < (lane < 8 ? 5 : 2); ++round) {
                count += __popc(__ballot_sync(mask, 1));
              }
              return count;
            }),
            expected([](int lane) { return lane < 8 ? 5 * 8 : 2 * 24; }));
}

TEST(Warp, Reductions) {
  EXPECT_EQ(per_lane([](int lane) { return __reduce_add_sync(kAllLanes, lane - 16); }),
            expected([](int) { return -16; }));
  EXPECT_EQ(per_lane([](int lane) { return __reduce_min_sync(kAllLanes, lane - 16); }),
            expected([](int) { return -16; }));
  EXPECT_EQ(per_lane([](int lane) { return __reduce_max_sync(kAllLanes, lane - 16); }),
            expected([](int) { return 15; }));
  EXPECT_EQ(per_lane([](int lane) {
              const auto bits = static_cast<unsigned>(lane);
              return static_cast<int>(
                  __reduce_or_sync(kAllLanes, bits) + __reduce_and_sync(kAllLanes, bits | 64u) +
                  __reduce_xor_sync(kAllLanes, bits) + __reduce_min_sync(kAllLanes, bits - 1u) +
                  __reduce_max_sync(kAllLanes, bits));
            }),
            expected([](int) { return 31 + 64 + 0 + 0 + 31; }));
}

TEST(Warp, MatchAny) {
  EXPECT_EQ(per_lane([](int lane) { return __popc(__match_any_sync(kAllLanes, lane % 3)); }),
            expected([](int lane) { return lane % 3 == 2 ? 10 : 11; }));
}

// What __activemask() promises is only the lane itself.
TEST(Warp, ActiveMaskIsTheLaneAlone) {
  EXPECT_EQ(per_lane([](int lane) { return __activemask() == 1u << lane ? 1 : 0; }),
            expected([](int) { return 1; }));
}

// The last warp of a block may be short: its missing lanes count as returned.
__global__ void short_warp_kernel(unsigned* out) { out[threadIdx.x] = __ballot_sync(kAllLanes, 1); }

TEST(Warp, ShortLastWarp) {
  std::array<unsigned, 40> out{};
  launch(&short_warp_kernel, 1, 40, 0, nullptr, out.data());
  EXPECT_EQ(out[0], kAllLanes);
  EXPECT_EQ(out[39], 0xffu);
}

__global__ void returning_lanes_kernel(unsigned* out) {
  if (threadIdx.x >= 20) return;
  out[threadIdx.x] = __ballot_sync(kAllLanes, 1);
}

TEST(Warp, LanesThatHaveReturnedDoNotCount) {
  const auto results = results_by_schedule([] {
    std::array<unsigned, 20> out{};
    launch(&returning_lanes_kernel, 1, 32, 0, nullptr, out.data());
    return out;
  });
  for (const auto& out : results) {
    for (const unsigned ballot : out) EXPECT_EQ(ballot, 0xfffffu);
  }
}

}  // namespace
}  // namespace paged_kv::cuda::testing
