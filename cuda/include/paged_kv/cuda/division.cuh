// SPDX-License-Identifier: Apache-2.0
//
// 64-bit division for kernels. That of the language is a call of a subroutine on the GPU: about 100
// instructions, and registers saved to a stack around it.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace paged_kv::cuda {

struct Division {
  std::int64_t quotient;
  std::int64_t remainder;
};

// `value` >= 0, `divisor` > 0. Quick if both are below 2^32, as slots and positions nearly always
// are; else a bit at a time.
[[nodiscard]] __device__ __forceinline__ Division divide(std::int64_t value, std::int64_t divisor) {
  const auto v = static_cast<std::uint64_t>(value);
  const auto d = static_cast<std::uint64_t>(divisor);
  if (((v | d) >> 32) == 0) {
    const auto v32 = static_cast<std::uint32_t>(v);
    const auto d32 = static_cast<std::uint32_t>(d);
    return {.quotient = v32 / d32, .remainder = v32 % d32};
  }
  std::uint64_t quotient = 0;
  std::uint64_t remainder = 0;
#pragma unroll 1
  for (int bit = 62; bit >= 0; --bit) {
    remainder = remainder << 1 | (v >> bit & 1);
    if (remainder < d) continue;
    remainder -= d;
    quotient |= std::uint64_t{1} << bit;
  }
  return {.quotient = static_cast<std::int64_t>(quotient),
          .remainder = static_cast<std::int64_t>(remainder)};
}

}  // namespace paged_kv::cuda
