// SPDX-License-Identifier: Apache-2.0
//
// Fetches memory into the cache ahead of its use, a line now and then. Everything is in an
// anonymous namespace, so that no symbol is shared between instruction sets.
#pragma once

#include "ops/cpu/isa/lines_ahead.h"

namespace paged_kv::cpu {
namespace {

// Spreads the lines of a call over the turns of its loops. A processor has only a dozen or two of
// lines under way and stands still when it is asked for more.
class LineFetcher {
 public:
  // So many turns are to come. `ahead` may be null; it is changed by finish() only.
  LineFetcher(const LinesAhead* ahead, int64_t num_turns) {
    if (ahead == nullptr || ahead->num_rows == 0) return;
    ahead_ = *ahead;
    turns_until_next_ = 1;
    // Unsigned: half as long as the division of signed integers of 64 bits.
    const auto num_lines = static_cast<uint32_t>(ahead->num_per_call);
    const auto turns = static_cast<uint32_t>(num_turns);
    if (turns > num_lines) {
      turns_apart_ = turns / num_lines;
    } else if (turns > 0) {
      lines_at_once_ = (num_lines + turns - 1) / turns;
    }
  }

  void finish(LinesAhead* ahead) const {
    if (ahead_.rows != nullptr) *ahead = ahead_;
  }

  // The turns of one loop. Only the counter is the loop's own, and has a register.
  class Loop {
   public:
    explicit Loop(LineFetcher& fetcher)
        : fetcher_(fetcher), turns_until_next_(fetcher.turns_until_next_) {}

    [[gnu::always_inline]] void turn() {
      // Unlikely also where it is not: the loop is quicker with these instructions out of its way.
      if (--turns_until_next_ == 0) [[unlikely]]
        turns_until_next_ = fetcher_.fetch();
    }

    void finish() const { fetcher_.turns_until_next_ = turns_until_next_; }

   private:
    LineFetcher& fetcher_;
    int64_t turns_until_next_;
  };

 private:
  static constexpr int64_t kNever = -1;  // turn() counts down from it

  // Returns the turns until the next call.
  [[gnu::always_inline]] int64_t fetch() {
    int64_t num_lines = lines_at_once_;
    do {
      __builtin_prefetch(ahead_.line);
      ahead_.line += kLineBytes;
      if (ahead_.line >= ahead_.row_end) [[unlikely]] {
        if (--ahead_.num_rows == 0) return kNever;
        ahead_.begin_row(ahead_.rows + 1);
      }
    } while (--num_lines > 0);
    return turns_apart_;
  }

  LinesAhead ahead_{};
  int64_t turns_until_next_ = kNever;
  int64_t turns_apart_ = 1;
  int64_t lines_at_once_ = 1;
};

}  // namespace
}  // namespace paged_kv::cpu
