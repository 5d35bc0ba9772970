// SPDX-License-Identifier: Apache-2.0
//
// The emulator's side of paged_kv/cuda/ptx.cuh: the same functions, contracts there.
#pragma once

#include "simt/async_copy.h"
#include "simt/thread.h"

#include <cmath>
#include <cstdint>
#include <limits>

namespace paged_kv::cuda::ptx {

[[nodiscard]] inline float exp2_approx(float x) {
  const float result = exp2f(x);
  return result < std::numeric_limits<float>::min() ? 0.0f : result;
}

[[nodiscard]] inline uint4 load_streaming(const uint4* address,
                                          simt::Location location = simt::Location::current()) {
  if (reinterpret_cast<std::uintptr_t>(address) % alignof(uint4) != 0) {
    simt::fail("a 16-byte load from a misaligned address", location);
  }
  return *address;
}

[[nodiscard]] inline uint2 load_streaming(const uint2* address,
                                          simt::Location location = simt::Location::current()) {
  if (reinterpret_cast<std::uintptr_t>(address) % alignof(uint2) != 0) {
    simt::fail("an 8-byte load from a misaligned address", location);
  }
  return *address;
}

inline void cp_async_16(void* shared_dst, const void* global_src, int num_src_bytes = 16,
                        simt::Location location = simt::Location::current()) {
  const simt::AsyncCopy copy{.dst = static_cast<unsigned char*>(shared_dst),
                             .src = static_cast<const unsigned char*>(global_src),
                             .num_bytes = 16,
                             .num_src_bytes = num_src_bytes};
  if (simt::issue_async_copy(copy, location)) simt::perform_async_copy(copy);
}

inline void cp_async_commit() { simt::commit_async_copies(); }

template <int kMaxPending>
void cp_async_wait() {
  for (simt::AsyncCopy copy; simt::next_due_async_copy(kMaxPending, &copy);) {
    simt::perform_async_copy(copy);
  }
}

}  // namespace paged_kv::cuda::ptx
