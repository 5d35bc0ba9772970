// SPDX-License-Identifier: Apache-2.0
#include "simt/warp.h"

#include "block.h"
#include "places.h"

#include <algorithm>
#include <array>

namespace paged_kv::simt {
namespace {

constexpr unsigned lane_bit(int lane) { return 1u << lane; }

template <class F>
void for_each_lane(unsigned lanes, F visit) {
  for (; lanes != 0; lanes &= lanes - 1) visit(std::countr_zero(lanes));
}

// Plain loops instead of memcpy: see sanitizers.h.
void copy_bytes(void* dst, const void* src, std::size_t num_bytes) {
  for (std::size_t i = 0; i < num_bytes; ++i) {
    static_cast<unsigned char*>(dst)[i] = static_cast<const unsigned char*>(src)[i];
  }
}

void combine_nothing(WarpExchange&) {}

void combine_shuffle(WarpExchange& warp) {
  std::array<std::uint64_t, warpSize> values;
  for_each_lane(warp.present, [&](int lane) {
    values[static_cast<std::size_t>(lane)] = warp.at<std::uint64_t>(lane);
  });
  for_each_lane(warp.present, [&](int lane) {
    const int source = warp.source_lanes[lane];
    if ((warp.present & lane_bit(source)) == 0) {
      fail("a shuffle reads a lane that takes no part: lane " + std::to_string(lane) +
               " reads lane " + std::to_string(source) +
               ", which the mask leaves out or which has returned",
           warp.location);
    }
    warp.at<std::uint64_t>(lane) = values[static_cast<std::size_t>(source)];
  });
}

template <class T, class F>
void fold(WarpExchange& warp, T start, F update) {
  T result = start;
  for_each_lane(warp.present, [&](int lane) { result = update(result, warp.at<T>(lane), lane); });
  for_each_lane(warp.present, [&](int lane) { warp.at<T>(lane) = result; });
}

void combine_ballot(WarpExchange& warp) {
  fold(warp, 0u, [](unsigned r, unsigned vote, int lane) { return r | (vote << lane); });
}
void combine_add(WarpExchange& warp) {
  fold(warp, 0u, [](unsigned r, unsigned x, int) { return r + x; });
}
void combine_and(WarpExchange& warp) {
  fold(warp, ~0u, [](unsigned r, unsigned x, int) { return r & x; });
}
void combine_or(WarpExchange& warp) {
  fold(warp, 0u, [](unsigned r, unsigned x, int) { return r | x; });
}
void combine_xor(WarpExchange& warp) {
  fold(warp, 0u, [](unsigned r, unsigned x, int) { return r ^ x; });
}
template <class T>
void combine_min(WarpExchange& warp) {
  const T start = warp.at<T>(std::countr_zero(warp.present));
  fold(warp, start, [](T r, T x, int) { return std::min(r, x); });
}
template <class T>
void combine_max(WarpExchange& warp) {
  const T start = warp.at<T>(std::countr_zero(warp.present));
  fold(warp, start, [](T r, T x, int) { return std::max(r, x); });
}

void combine_match_any(WarpExchange& warp) {
  std::array<std::uint64_t, warpSize> equal_lanes{};
  for_each_lane(warp.present, [&](int lane) {
    for_each_lane(warp.present, [&](int other) {
      if (warp.at<std::uint64_t>(other) == warp.at<std::uint64_t>(lane)) {
        equal_lanes[static_cast<std::size_t>(lane)] |= lane_bit(other);
      }
    });
  });
  for_each_lane(warp.present, [&](int lane) {
    warp.at<std::uint64_t>(lane) = equal_lanes[static_cast<std::size_t>(lane)];
  });
}

}  // namespace

const WarpOp kSyncWarp{.name = "__syncwarp", .combine = combine_nothing, .orders_memory = true};
const WarpOp kShuffle{.name = "__shfl_sync", .combine = combine_shuffle};
const WarpOp kBallot{.name = "__ballot_sync", .combine = combine_ballot};
const WarpOp kReduceAdd{.name = "__reduce_add_sync", .combine = combine_add};
const WarpOp kReduceMinSigned{.name = "__reduce_min_sync", .combine = combine_min<int>};
const WarpOp kReduceMinUnsigned{.name = "__reduce_min_sync", .combine = combine_min<unsigned>};
const WarpOp kReduceMaxSigned{.name = "__reduce_max_sync", .combine = combine_max<int>};
const WarpOp kReduceMaxUnsigned{.name = "__reduce_max_sync", .combine = combine_max<unsigned>};
const WarpOp kReduceAnd{.name = "__reduce_and_sync", .combine = combine_and};
const WarpOp kReduceOr{.name = "__reduce_or_sync", .combine = combine_or};
const WarpOp kReduceXor{.name = "__reduce_xor_sync", .combine = combine_xor};
const WarpOp kMatchAny{.name = "__match_any_sync", .combine = combine_match_any};

void check_shuffle_width(int width, Location location) {
  if (width >= 1 && width <= warpSize && (width & (width - 1)) == 0) return;
  fail("shuffle width " + std::to_string(width) + " is not 1, 2, 4, 8, 16 or 32", location);
}

void warp_exchange(unsigned mask, const WarpOp& op, void* operand, std::size_t num_bytes,
                   int source_lane, Location location) {
  block().exchange_in_warp(mask, op, operand, num_bytes, source_lane, location);
}

void Block::exchange_in_warp(unsigned mask, const WarpOp& op, void* operand, std::size_t num_bytes,
                             int source_lane, Location location) {
  Thread& self = running();
  const int warp_idx = self.index / warpSize;
  Warp& warp = warps_[to_index(warp_idx)];
  self.location = location;
  if ((mask & lane_bit(self.lane)) == 0) {
    fail(std::string("lane ") + std::to_string(self.lane) + " calls " + op.name +
             " with a mask that leaves it out",
         location);
  }
  self.activity = Activity::kInWarpOp;
  self.waits_in = op.name;
  self.warp_op = &op;
  self.mask = mask;
  warp.waiting |= lane_bit(self.lane);
  copy_bytes(warp.exchange.operands[self.lane].bytes, operand, num_bytes);
  warp.exchange.source_lanes[self.lane] = source_lane;

  const int lowest_lane = std::countr_zero(mask);
  const unsigned turn = warp.num_completed[to_index(lowest_lane)] % kNumTurns;
  const int token =
      kNumBarrierTokens + (warp_idx * warpSize + lowest_lane) * kNumTurns + static_cast<int>(turn);
  if (op.orders_memory) tokens_.release(token);
  complete_warp_op_if_full(warp_idx, mask);
  wait_for_turn();
  if (op.orders_memory) tokens_.acquire(token);
  copy_bytes(operand, warp.exchange.operands[self.lane].bytes, num_bytes);
}

// The lanes that `mask` names meet if all of them that have not returned wait in this collective.
void Block::complete_warp_op_if_full(int warp_idx, unsigned mask) {
  Warp& warp = warps_[to_index(warp_idx)];
  const unsigned present = mask & warp.live;
  if (present == 0 || (present & ~warp.waiting) != 0) return;
  const int first = warp_idx * warpSize;
  const Thread& some = threads_[to_index(first + std::countr_zero(present))];
  bool all_expect_each_other = true;
  for_each_lane(present, [&](int lane) {
    const Thread& thread = threads_[to_index(first + lane)];
    if (thread.mask != mask) {
      all_expect_each_other = false;  // it waits for others before it comes here
    } else if (some.mask == mask &&
               (thread.warp_op != some.warp_op || !same_place(thread.location, some.location))) {
      fail("lanes of one warp meet in different calls: lane " + std::to_string(some.lane) + " in " +
               some.waits_in + ", " + to_string(some.location) + "; lane " + std::to_string(lane) +
               " in " + thread.waits_in + ", " + to_string(thread.location),
           thread.location);
    }
  });
  if (!all_expect_each_other) return;

  warp.exchange.present = present;
  warp.exchange.location = some.location;
  some.warp_op->combine(warp.exchange);
  ++warp.num_completed[to_index(std::countr_zero(mask))];
  warp.waiting &= ~present;
  for_each_lane(present, [&](int lane) { make_ready(threads_[to_index(first + lane)]); });
}

void Block::complete_warp_ops_of(int warp_idx) {
  for_each_lane(warps_[to_index(warp_idx)].waiting, [&](int lane) {
    const Thread& thread = threads_[to_index(warp_idx * warpSize + lane)];
    if (thread.activity == Activity::kInWarpOp) complete_warp_op_if_full(warp_idx, thread.mask);
  });
}

}  // namespace paged_kv::simt
