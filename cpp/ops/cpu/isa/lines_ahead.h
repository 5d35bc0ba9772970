// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdint.h>

namespace paged_kv::cpu {

inline constexpr int64_t kLineBytes = 64;

// Memory in one piece.
struct MemoryRun {
  const char* begin;
  const char* end;
};

// Collects memory in order; pieces that follow one another become one run.
class MemoryRuns {
 public:
  // `runs` has room for as many as there will be pieces.
  explicit MemoryRuns(MemoryRun* runs) noexcept : runs_(runs) {}

  void add(const void* begin, int64_t num_bytes) noexcept {
    const char* first = static_cast<const char*>(begin);
    if (first != last_.end) {
      store_last();
      last_ = {first, first};
    }
    last_.end += num_bytes;
  }

  // How many runs there are. The last call.
  int64_t finish() noexcept {
    store_last();
    return count_;
  }

 private:
  void store_last() noexcept {
    if (last_.begin != last_.end) runs_[count_++] = last_;
  }

  MemoryRun* runs_;
  int64_t count_ = 0;
  MemoryRun last_{};  // the one that may become longer, in registers
};

// Memory that is used soon, to be fetched into the cache meanwhile, in the order of `runs` and of
// the memory: lines in order come from the same page of DRAM. What a call has fetched it takes out.
//
// Lines are fetched in groups, since finding out whether it is time for one takes longer than
// asking for four. So up to three lines behind a run are fetched, too. A run that does not begin
// with a line may leave its last one out.
struct LinesAhead {
  static constexpr int64_t kGroupLines = 4;
  static constexpr int64_t kGroupBytes = kGroupLines * kLineBytes;

  const MemoryRun* runs = nullptr;
  int64_t num_runs = 0;
  int64_t groups_per_call = 0;  // a call spreads so many over its work
  const char* next = nullptr;   // the next group, of the first run

  // All of some runs, none of which is empty, for so many calls.
  static LinesAhead of(const MemoryRun* runs, int64_t num_runs, int64_t num_calls) noexcept {
    if (num_runs == 0) return {};
    LinesAhead lines{.runs = runs, .num_runs = num_runs, .next = runs[0].begin};
    lines.groups_per_call = (lines.num_groups() + num_calls - 1) / num_calls;
    return lines;
  }

  // Of what is left. Cost: O(runs).
  int64_t num_groups() const noexcept {
    int64_t result = 0;
    for (int64_t i = 0; i < num_runs; ++i) {
      const char* begin = i == 0 ? next : runs[i].begin;
      result += (runs[i].end - begin + kGroupBytes - 1) / kGroupBytes;
    }
    return result;
  }
};

}  // namespace paged_kv::cpu
