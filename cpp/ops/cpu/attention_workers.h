// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ops/cpu/attention_tile.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace paged_kv::cpu {

// How many threads the batch is worth. Waking a thread takes some microseconds, in which one alone
// does a short decode step.
template <class T>
[[nodiscard]] std::int64_t max_useful_threads(const PagedAttentionParams<T>& params) {
  constexpr double kMinProductsPerThread = 1 << 16;
  double num_logits = 0;  // of one head, masked ones included; a double cannot overflow
  for (std::int64_t seq = 0; seq < params.batch.num_seqs(); ++seq) {
    num_logits += static_cast<double>(params.batch.query_len(seq)) * params.batch.seq_lens[seq];
  }
  const double products = num_logits * static_cast<double>(params.num_heads * params.head_size);
  return 1 + static_cast<std::int64_t>(std::min(products / kMinProductsPerThread, 1e6));
}

// f(attention_tile, item) for the items [0, num_items): each thread takes the next one when it is
// done with its last, since their costs differ. Which thread takes which changes no result.
template <class T, class F>
void for_each_item(const PagedAttentionParams<T>& params, std::int64_t num_items,
                   const ThreadRunner& runner, const F& f) {
  const std::int64_t num_workers =
      std::min({runner.num_threads(), num_items, max_useful_threads(params)});
  std::vector<AttentionTile<T>> workers;  // allocated before the threads, which must not throw
  workers.reserve(static_cast<std::size_t>(num_workers));
  for (std::int64_t i = 0; i < num_workers; ++i) workers.emplace_back(params);

  std::atomic<std::int64_t> next_item{0};
  parallel_for(runner, num_workers, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t worker = begin; worker < end; ++worker) {
      for (;;) {
        const std::int64_t item = next_item.fetch_add(1, std::memory_order_relaxed);
        if (item >= num_items) break;
        f(workers[static_cast<std::size_t>(worker)], item);
      }
    }
  });
}

}  // namespace paged_kv::cpu
