// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ops/cpu/thread_runner.h"

#include <torch/csrc/stable/ops.h>

namespace paged_kv {

// torch's own threads: their number is torch.get_num_threads().
inline constexpr cpu::ThreadRunner kTorchRunner{
    .run =
        [](std::int64_t num_items, std::int64_t grain, cpu::ThreadRunner::Body body,
           void* context) {
          torch::stable::parallel_for(
              0, num_items, grain,
              [=](std::int64_t begin, std::int64_t end) { body(begin, end, context); });
        },
    .num_threads = [] { return std::int64_t{torch::stable::get_num_threads()}; },
};

}  // namespace paged_kv
