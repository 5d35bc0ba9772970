// SPDX-License-Identifier: Apache-2.0
//
// How much of the prompts the prefix cache gave, since the last report.
//
// Source: vLLM 0.32 v1/metrics/stats.py::PrefixCacheStats.
#pragma once

#include <cstdint>

namespace paged_kv {

struct PrefixCacheStats {
  bool reset = false;         // the cache was emptied
  std::int64_t requests = 0;  // that looked
  std::int64_t queries = 0;   // their tokens
  std::int64_t hits = 0;      // tokens found
  // The same for requests that had been preempted: they find their own blocks.
  std::int64_t preempted_requests = 0;
  std::int64_t preempted_queries = 0;
  std::int64_t preempted_hits = 0;

  void record(std::int64_t num_tokens, std::int64_t num_hits, bool preempted) noexcept {
    (preempted ? preempted_requests : requests) += 1;
    (preempted ? preempted_queries : queries) += num_tokens;
    (preempted ? preempted_hits : hits) += num_hits;
  }
};

}  // namespace paged_kv
