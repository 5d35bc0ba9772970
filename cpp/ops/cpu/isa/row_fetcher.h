// SPDX-License-Identifier: Apache-2.0
//
// Fetches rows into the cache ahead of their use. Everything is in an anonymous namespace: see
// attention_kernels.h.
#pragma once

#include "ops/cpu/isa/attention_kernels.h"

namespace paged_kv::cpu {
namespace {

inline constexpr int64_t kLineBytes = 64;

// What one of several passes over the keys fetches of the rows that come next: a stretch of each,
// a line every so many elements of a key. A processor has only a dozen or two of lines under way
// and stands still when it is asked for more, so fetches must be spread over the work.
struct RowFetcher {
  const void* const* rows;
  int64_t count;
  int64_t begin = 0, end = 0;  // of the stretch, in bytes from the row's first
  int64_t elements_apart = 0;  // of the key, from one line to the next
  // Of the row, or -1: not in this pass. Rows that do not begin with a line end in one more.
  int64_t last_byte = -1;

  RowFetcher(const TokenRows& tokens, int64_t pass, int64_t num_passes)
      : rows(tokens.next_rows), count(tokens.next_count) {
    if (count == 0) return;
    const int64_t row_bytes = tokens.size * tokens.next_element_size;
    const int64_t num_lines = (row_bytes + kLineBytes - 1) / kLineBytes;
    const int64_t stretch = (num_lines + num_passes - 1) / num_passes * kLineBytes;
    begin = pass * stretch;
    end = begin + stretch < row_bytes ? begin + stretch : row_bytes;
    elements_apart = kLineBytes / tokens.next_element_size * num_passes;
    if (end == row_bytes && begin < end) last_byte = row_bytes - 1;
  }

  [[gnu::always_inline]] void fetch(int64_t row, int64_t byte) const {
    __builtin_prefetch(static_cast<const char*>(rows[row]) + byte);
  }
  void fetch_row(int64_t row) const {
    for (int64_t byte = begin; byte < end; byte += kLineBytes) fetch(row, byte);
    if (last_byte >= 0) fetch(row, last_byte);
  }
};

}  // namespace
}  // namespace paged_kv::cpu
