// SPDX-License-Identifier: Apache-2.0
//
// Integer helpers. Sizes and ids are signed.
#pragma once

#include "paged_kv/check.h"

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace paged_kv {

// The largest number of an int32 tensor, in the type that counts are checked in.
inline constexpr std::int64_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();

// An index or a count for the standard library. Needs n >= 0.
[[nodiscard]] constexpr std::size_t to_size(std::int64_t n) noexcept {
  return static_cast<std::size_t>(n);
}

// Smallest q with q * b >= a. Needs a >= 0 and b > 0.
template <std::signed_integral T>
[[nodiscard]] constexpr T ceil_div(T a, T b) noexcept {
  return a / b + (a % b != 0 ? 1 : 0);
}

// Smallest multiple of b that is >= a. Needs a >= 0 and b > 0.
template <std::signed_integral T>
[[nodiscard]] constexpr T round_up(T a, T b) noexcept {
  return ceil_div(a, b) * b;
}

// `value` as a `To`; throws std::invalid_argument naming `what` if it does not fit.
template <std::integral To, std::integral From>
[[nodiscard]] constexpr To narrow(From value, const char* what) {
  const To result = static_cast<To>(value);
  PAGED_KV_CHECK(static_cast<From>(result) == value && (result < To{}) == (value < From{}), what,
                 ": ", value, " is out of range");
  return result;
}

}  // namespace paged_kv
