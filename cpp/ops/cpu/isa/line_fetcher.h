// SPDX-License-Identifier: Apache-2.0
//
// Fetches memory into the cache ahead of its use, a line now and then. Everything is in an
// anonymous namespace, so that no symbol is shared between instruction sets.
#pragma once

#include "ops/cpu/isa/lines_ahead.h"

namespace paged_kv::cpu {
namespace {

// Spreads the groups of a call over the turns of its loops. A processor has only a dozen or two of
// lines under way and stands still when it is asked for more.
class LineFetcher {
 public:
  // So many turns are to come. `ahead` may be null; it is changed by finish() only.
  LineFetcher(const LinesAhead* ahead, int64_t num_turns) {
    if (ahead == nullptr || ahead->num_runs == 0) return;
    ahead_ = *ahead;
    run_end_ = ahead->runs->end;
    turns_until_next_ = 1;
    // Unsigned: half as long as the division of signed integers of 64 bits.
    const auto num_groups = static_cast<uint32_t>(ahead->groups_per_call);
    const auto turns = static_cast<uint32_t>(num_turns);
    if (turns > num_groups) {
      turns_apart_ = turns / num_groups;
    } else if (turns > 0) {
      groups_at_once_ = (num_groups + turns - 1) / turns;
    }
  }

  void finish(LinesAhead* ahead) const {
    if (ahead_.runs != nullptr) *ahead = ahead_;
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
    int64_t num_groups = groups_at_once_;
    do {
      for (int64_t i = 0; i < LinesAhead::kGroupLines; ++i) {
        __builtin_prefetch(ahead_.next + i * kLineBytes);
      }
      ahead_.next += LinesAhead::kGroupBytes;
      if (ahead_.next >= run_end_) [[unlikely]] {
        if (--ahead_.num_runs == 0) return kNever;
        ++ahead_.runs;
        ahead_.next = ahead_.runs->begin;
        run_end_ = ahead_.runs->end;
      }
    } while (--num_groups > 0);
    return turns_apart_;
  }

  LinesAhead ahead_{};
  const char* run_end_ = nullptr;
  int64_t turns_until_next_ = kNever;
  int64_t turns_apart_ = 1;
  int64_t groups_at_once_ = 1;
};

}  // namespace
}  // namespace paged_kv::cpu
