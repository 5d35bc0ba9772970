// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <concepts>
#include <cstdint>
#include <cstring>

namespace paged_kv {

// Writes `value` to out[0 .. sizeof(T)), the highest byte first. One instruction or two, which
// compilers do not make of a loop over bytes.
template <std::unsigned_integral T>
  requires(sizeof(T) == 4 || sizeof(T) == 8)
inline void store_big_endian(T value, std::uint8_t* out) noexcept {
  if constexpr (std::endian::native == std::endian::little) {
    if constexpr (sizeof(T) == 4) {
      value = __builtin_bswap32(value);
    } else {
      value = __builtin_bswap64(value);
    }
  }
  std::memcpy(out, &value, sizeof value);
}

}  // namespace paged_kv
