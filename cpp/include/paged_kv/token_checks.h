// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "paged_kv/check.h"

#include <cstdint>

namespace paged_kv {

// Sums of a few of these stay far from overflow.
inline constexpr std::int64_t kMaxTokens = std::int64_t{1} << 40;

[[noreturn, gnu::noinline]] inline void refuse_tokens(std::int64_t num_tokens, const char* name) {
  PAGED_KV_CHECK(false, name, " must be in [0, 2**40], got ", num_tokens);
}

// Throws std::invalid_argument unless 0 <= num_tokens <= kMaxTokens.
inline void check_tokens(std::int64_t num_tokens, const char* name) {
  if (num_tokens < 0 || num_tokens > kMaxTokens) [[unlikely]]
    refuse_tokens(num_tokens, name);
}

}  // namespace paged_kv
