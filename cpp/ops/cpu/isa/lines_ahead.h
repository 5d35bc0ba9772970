// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdint.h>

namespace paged_kv::cpu {

inline constexpr int64_t kLineBytes = 64;

// Lines of memory that are used soon, to be fetched into the cache meanwhile, in the order of
// `rows` and of the memory: lines in order come from the same page of DRAM. What a call has fetched
// it takes out. A row that does not begin with a line may leave its last one out.
struct LinesAhead {
  const void* const* rows = nullptr;
  int64_t num_rows = 0;
  int64_t row_bytes = 0;
  int64_t num_per_call = 0;    // a call spreads so many lines over its work
  const char* line = nullptr;  // the next to fetch, of the first row
  const char* row_end = nullptr;

  // All lines of some rows, for so many calls.
  static LinesAhead of(const void* const* rows, int64_t num_rows, int64_t row_bytes,
                       int64_t num_calls) noexcept {
    if (num_rows == 0) return {};
    LinesAhead lines{.rows = rows, .num_rows = num_rows, .row_bytes = row_bytes};
    const int64_t num_lines = num_rows * lines.lines_per_row();
    lines.num_per_call = (num_lines + num_calls - 1) / num_calls;
    lines.begin_row(rows);
    return lines;
  }

  int64_t lines_per_row() const noexcept { return (row_bytes + kLineBytes - 1) / kLineBytes; }
  [[gnu::always_inline]] void begin_row(const void* const* row) noexcept {
    rows = row;
    line = static_cast<const char*>(*row);
    row_end = line + row_bytes;
  }
};

}  // namespace paged_kv::cpu
