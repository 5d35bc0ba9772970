// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "paged_kv/ids.h"

#include <chrono>
#include <cstdint>
#include <deque>
#include <unordered_map>
#include <vector>

namespace paged_kv {

// The life of one block between two allocations, in seconds.
struct KVCacheEvictionEvent {
  double lifetime_seconds = 0.0;
  double idle_seconds = 0.0;               // since it was last used
  std::vector<double> reuse_gaps_seconds;  // between its last uses, at most three
};

// Watches a sample of the blocks of a pool: how long content stays, and how often it is used again.
//
// Cost: one random number per allocation, one lookup per use of a block.
// Thread rule: that of the pool.
// Source: vLLM 0.32 v1/core/kv_cache_metrics.py::KVCacheMetricsCollector.
class KVCacheMetricsCollector {
 public:
  // `sample_rate`: share of the allocations that is watched, in (0, 1].
  explicit KVCacheMetricsCollector(double sample_rate = 0.01, std::uint64_t seed = 0);

  [[nodiscard]] double sample_rate() const noexcept { return sample_rate_; }

  // Called by the pool. Without memory for it, a block is not watched.
  void on_block_allocated(BlockId block) noexcept;
  void on_block_accessed(BlockId block) noexcept;
  void on_block_evicted(BlockId block) noexcept;
  void reset();

  // The blocks that were handed out again since the last call.
  [[nodiscard]] std::vector<KVCacheEvictionEvent> drain_events();

 private:
  using Clock = std::chrono::steady_clock;
  struct Life {
    Clock::time_point birth;
    Clock::time_point last_access;
    std::deque<Clock::time_point> accesses;  // the last kMaxAccesses
  };
  static constexpr std::size_t kMaxAccesses = 4;

  [[nodiscard]] bool is_sampled() noexcept;
  template <class Note>
  void watch(BlockId block, Note note) noexcept;
  void end_life(BlockId block);

  double sample_rate_;
  std::uint64_t random_state_;
  std::unordered_map<BlockId, Life> lives_;
  std::vector<KVCacheEvictionEvent> events_;
};

}  // namespace paged_kv
