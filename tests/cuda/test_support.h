// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "paged_kv/cuda/launch.h"
#include "simt/options.h"

#include <string>
#include <utility>
#include <vector>

namespace paged_kv::cuda::testing {

#if defined(__SANITIZE_THREAD__)
inline constexpr bool kUnderTsan = true;
#else
inline constexpr bool kUnderTsan = false;
#endif
#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool kUnderAsan = true;
#else
inline constexpr bool kUnderAsan = false;
#endif

// What the launch threw, or "".
template <class... Params, class... Args>
[[nodiscard]] std::string error_of(void (*kernel)(Params...), dim3 grid, dim3 block,
                                   Args&&... args) {
  try {
    launch(kernel, grid, block, 0, nullptr, std::forward<Args>(args)...);
  } catch (const simt::KernelError& error) {
    return error.what();
  }
  return "";
}

// run() under each schedule. A correct kernel gives equal results.
template <class F>
[[nodiscard]] auto results_by_schedule(F run) {
  std::vector<decltype(run())> results;
  for (const simt::Options& schedule : simt::all_schedules()) {
    const simt::ScopedOptions scope(schedule);
    results.push_back(run());
  }
  return results;
}

// Data races that TSan has reported in this process so far; 0 without TSan. A test that leaves
// reports behind which it did not take with this function fails.
[[nodiscard]] int take_race_reports();

}  // namespace paged_kv::cuda::testing
