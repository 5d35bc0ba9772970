// SPDX-License-Identifier: Apache-2.0
//
// How a kernel runs on several threads without knowing whose they are: the ops pass torch's, tests
// pass std::thread or none. The library starts no threads of its own.
#pragma once

#include <algorithm>
#include <cstdint>

namespace paged_kv::cpu {

// Both functions may be called from any thread; neither may be null.
struct ThreadRunner {
  // Handles the items [begin, end). Must not throw.
  using Body = void (*)(std::int64_t begin, std::int64_t end, void* context);

  // Splits [0, num_items) into ranges of at least `grain` items (the last may be shorter), calls
  // `body` once for each, at the same time where it can, and returns when all are done.
  void (*run)(std::int64_t num_items, std::int64_t grain, Body body, void* context);
  // At most so many ranges are handled at the same time.
  std::int64_t (*num_threads)();
};

// body(begin, end) over ranges of [0, num_items); see ThreadRunner::run.
template <class F>
void parallel_for(const ThreadRunner& runner, std::int64_t num_items, std::int64_t grain,
                  F&& body) {
  if (num_items == 0) return;
  runner.run(
      num_items, grain,
      [](std::int64_t begin, std::int64_t end, void* context) {
        (*static_cast<F*>(context))(begin, end);
      },
      &body);
}

// The grain of a copy whose items have `item_bytes`, so that a task moves about 64 KiB: below that,
// waking a thread costs more than the copy.
[[nodiscard]] constexpr std::int64_t copies_per_task(std::int64_t item_bytes) noexcept {
  constexpr std::int64_t kTaskBytes = 64 * 1024;
  return std::max<std::int64_t>(1, kTaskBytes / std::max<std::int64_t>(1, item_bytes));
}

// Everything in the calling thread.
inline constexpr ThreadRunner kSerialRunner{
    .run = [](std::int64_t num_items, std::int64_t, ThreadRunner::Body body,
              void* context) { body(0, num_items, context); },
    .num_threads = [] { return std::int64_t{1}; },
};

}  // namespace paged_kv::cpu
