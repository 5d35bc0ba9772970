// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ops/cpu/isa/lines_ahead.h"

#include <stdint.h>

namespace paged_kv::cpu {

// Keys that one call of a kernel handles at most, and the row length of `logits`.
inline constexpr int64_t kTileKeys = 64;

// Rows of keys or of values, one pointer a token: `size` elements each, dense, size a multiple of
// AttentionKernels::lanes. Only [begin, end) of the tokens is read.
struct TokenRows {
  const void* const* tokens;  // [kTileKeys]
  int64_t begin;
  int64_t end;
  int64_t size;
  int64_t offset_bytes = 0;     // of each row behind its pointer
  LinesAhead* ahead = nullptr;  // null: nothing to fetch

  [[gnu::always_inline]] const void* row(int64_t k) const {
    return static_cast<const char*>(tokens[k]) + offset_bytes;
  }
};

}  // namespace paged_kv::cpu
