// SPDX-License-Identifier: Apache-2.0
//
// Warp collectives: shuffles, votes, reductions, matches, __syncwarp.
//
// Every lane that `mask` names and that has not returned must reach the same call with the same
// mask. Each lane deposits its operand; the last to arrive computes every lane's result. So a
// collective of a new kind is one WarpOp. Only __syncwarp orders memory, as on the device.
//
// Stricter than the device, which calls these undefined: a lane outside its own mask; reading from
// a lane that the mask leaves out or that has returned; lanes that meet in different calls.
#pragma once

#include "simt/thread.h"

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace paged_kv::simt {

inline constexpr std::size_t kMaxOperandBytes = 64;

struct WarpExchange {
  struct alignas(kMaxOperandBytes) Operand {
    unsigned char bytes[kMaxOperandBytes];
  };
  Operand operands[warpSize];  // in: what each lane deposited; out: its result
  int source_lanes[warpSize];  // of shuffles
  unsigned present = 0;        // lanes that take part
  Location location{};

  template <class T>
  [[nodiscard]] T& at(int lane) noexcept {
    return *reinterpret_cast<T*>(operands[lane].bytes);
  }
};

struct WarpOp {
  const char* name;
  void (*combine)(WarpExchange&);  // runs once, when the last lane has arrived
  bool orders_memory = false;
};

// Deposits `num_bytes` of `operand`, waits for the lanes of `mask`, and fetches this lane's result
// into `operand`.
void warp_exchange(unsigned mask, const WarpOp& op, void* operand, std::size_t num_bytes,
                   int source_lane, Location location);

extern const WarpOp kSyncWarp, kShuffle, kBallot;
extern const WarpOp kReduceAdd, kReduceMinSigned, kReduceMinUnsigned, kReduceMaxSigned,
    kReduceMaxUnsigned, kReduceAnd, kReduceOr, kReduceXor;
extern const WarpOp kMatchAny;

// The types that __shfl_*_sync takes on the device; half types join through cuda_fp16.h.
template <class T>
inline constexpr bool kIsShuffleValue = std::is_arithmetic_v<T> && sizeof(T) >= 4;

template <class T>
T shuffle_from(unsigned mask, T value, int source_lane, Location location) {
  static_assert(kIsShuffleValue<T>, "no __shfl_*_sync for this type");
  warp_exchange(mask, kShuffle, &value, sizeof value, source_lane, location);
  return value;
}

// Throws unless `width` is 1, 2, 4, 8, 16 or 32.
void check_shuffle_width(int width, Location location);

template <class T>
T reduce(unsigned mask, const WarpOp& op, T value, Location location) {
  warp_exchange(mask, op, &value, sizeof value, 0, location);
  return value;
}

}  // namespace paged_kv::simt

#define PAGED_KV_SIMT_HERE paged_kv::simt::Location location = paged_kv::simt::Location::current()

inline void __syncwarp(unsigned mask = 0xffffffffu, PAGED_KV_SIMT_HERE) {
  paged_kv::simt::warp_exchange(mask, paged_kv::simt::kSyncWarp, nullptr, 0, 0, location);
}

// Lane `source` of this lane's segment of `width` lanes, modulo width.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize, PAGED_KV_SIMT_HERE) {
  paged_kv::simt::check_shuffle_width(width, location);
  const int lane = paged_kv::simt::current_thread->lane;
  const int source_lane = (lane & ~(width - 1)) | (source & (width - 1));
  return paged_kv::simt::shuffle_from(mask, value, source_lane, location);
}

// Out of the segment: the lane's own value.
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize, PAGED_KV_SIMT_HERE) {
  paged_kv::simt::check_shuffle_width(width, location);
  const int lane = paged_kv::simt::current_thread->lane;
  const bool inside = static_cast<unsigned>(lane & (width - 1)) >= delta;
  const int source_lane = inside ? lane - static_cast<int>(delta) : lane;
  return paged_kv::simt::shuffle_from(mask, value, source_lane, location);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize,
                   PAGED_KV_SIMT_HERE) {
  paged_kv::simt::check_shuffle_width(width, location);
  const int lane = paged_kv::simt::current_thread->lane;
  const bool inside = delta < static_cast<unsigned>(width - (lane & (width - 1)));
  const int source_lane = inside ? lane + static_cast<int>(delta) : lane;
  return paged_kv::simt::shuffle_from(mask, value, source_lane, location);
}

// A lane of a later segment is out of reach (own value); one of an earlier segment is not.
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = warpSize, PAGED_KV_SIMT_HERE) {
  paged_kv::simt::check_shuffle_width(width, location);
  const int lane = paged_kv::simt::current_thread->lane;
  const int target = lane ^ lane_mask;
  const int source_lane = target > (lane | (width - 1)) ? lane : target;
  return paged_kv::simt::shuffle_from(mask, value, source_lane, location);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, PAGED_KV_SIMT_HERE) {
  return paged_kv::simt::reduce(mask, paged_kv::simt::kBallot, predicate != 0 ? 1u : 0u, location);
}
inline int __any_sync(unsigned mask, int predicate, PAGED_KV_SIMT_HERE) {
  return __ballot_sync(mask, predicate, location) != 0 ? 1 : 0;
}
inline int __all_sync(unsigned mask, int predicate, PAGED_KV_SIMT_HERE) {
  return __ballot_sync(mask, predicate == 0, location) == 0 ? 1 : 0;
}

// The lanes that happen to run together: never more can be relied on than the lane itself, and that
// is what the emulator answers. Not a mask to synchronise with.
inline unsigned __activemask() { return 1u << paged_kv::simt::current_thread->lane; }

template <class T>
unsigned __match_any_sync(unsigned mask, T value, PAGED_KV_SIMT_HERE) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return static_cast<unsigned>(
      paged_kv::simt::reduce(mask, paged_kv::simt::kMatchAny, bits, location));
}

inline int __reduce_add_sync(unsigned mask, int value, PAGED_KV_SIMT_HERE) {
  const auto bits = static_cast<unsigned>(value);
  return static_cast<int>(paged_kv::simt::reduce(mask, paged_kv::simt::kReduceAdd, bits, location));
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value, PAGED_KV_SIMT_HERE) {
  return paged_kv::simt::reduce(mask, paged_kv::simt::kReduceAdd, value, location);
}
inline int __reduce_min_sync(unsigned mask, int value, PAGED_KV_SIMT_HERE) {
  return paged_kv::simt::reduce(mask, paged_kv::simt::kReduceMinSigned, value, location);
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value, PAGED_KV_SIMT_HERE) {
  return paged_kv::simt::reduce(mask, paged_kv::simt::kReduceMinUnsigned, value, location);
}
inline int __reduce_max_sync(unsigned mask, int value, PAGED_KV_SIMT_HERE) {
  return paged_kv::simt::reduce(mask, paged_kv::simt::kReduceMaxSigned, value, location);
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value, PAGED_KV_SIMT_HERE) {
  return paged_kv::simt::reduce(mask, paged_kv::simt::kReduceMaxUnsigned, value, location);
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned value, PAGED_KV_SIMT_HERE) {
  return paged_kv::simt::reduce(mask, paged_kv::simt::kReduceAnd, value, location);
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value, PAGED_KV_SIMT_HERE) {
  return paged_kv::simt::reduce(mask, paged_kv::simt::kReduceOr, value, location);
}
inline unsigned __reduce_xor_sync(unsigned mask, unsigned value, PAGED_KV_SIMT_HERE) {
  return paged_kv::simt::reduce(mask, paged_kv::simt::kReduceXor, value, location);
}
