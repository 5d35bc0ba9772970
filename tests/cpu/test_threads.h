// SPDX-License-Identifier: Apache-2.0
//
// Thread runners for kernel tests.
#pragma once

#include "ops/cpu/thread_runner.h"

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace paged_kv::cpu::testing {

// Pieces of one item, the last first: the worst split a runner may make.
inline constexpr ThreadRunner kBackwardsRunner{
    .run =
        [](std::int64_t num_items, std::int64_t, ThreadRunner::Body body, void* context) {
          for (std::int64_t i = num_items; i-- > 0;) {
            body(i, i + 1, context);
          }
        },
    .num_threads = [] { return std::int64_t{1}; },
};

// Four threads, whatever the grain: small tests become races that a sanitizer sees.
inline constexpr ThreadRunner kFourThreadsRunner{
    .run =
        [](std::int64_t num_items, std::int64_t, ThreadRunner::Body body, void* context) {
          const std::int64_t piece = (num_items + 3) / 4;
          std::vector<std::thread> threads;
          for (std::int64_t begin = 0; begin < num_items; begin += piece) {
            threads.emplace_back(body, begin, std::min(num_items, begin + piece), context);
          }
          for (std::thread& thread : threads) {
            thread.join();
          }
        },
    .num_threads = [] { return std::int64_t{4}; },
};

}  // namespace paged_kv::cpu::testing
