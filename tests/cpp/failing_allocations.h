// SPDX-License-Identifier: Apache-2.0
//
// Makes the n-th allocation of a call fail, for tests of calls that must change nothing then.
#pragma once

#include <new>

namespace paged_kv::testing {

// While one lives, the first `num_allowed` calls of operator new of this thread succeed, the next
// one throws std::bad_alloc, and those after it succeed.
class FailingAllocation {
 public:
  explicit FailingAllocation(int num_allowed) noexcept;
  ~FailingAllocation();
  FailingAllocation(const FailingAllocation&) = delete;
  FailingAllocation& operator=(const FailingAllocation&) = delete;
};

// Runs `call` again and again, with its first, second, ... allocation failing, until it succeeds.
// After each failure `check_unchanged` runs. Returns how often it failed.
template <class Call, class Check>
int fail_at_each_allocation(Call call, Check check_unchanged) {
  for (int num_allowed = 0;; ++num_allowed) {
    try {
      const FailingAllocation failing(num_allowed);
      call();
      return num_allowed;
    } catch (const std::bad_alloc&) {
    }
    check_unchanged();
  }
}

}  // namespace paged_kv::testing
