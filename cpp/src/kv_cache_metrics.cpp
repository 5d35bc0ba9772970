// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/kv_cache_metrics.h"

#include "paged_kv/check.h"

#include <new>
#include <utility>

namespace paged_kv {
namespace {

template <class Duration>
double seconds(Duration duration) {
  return std::chrono::duration<double>(duration).count();
}

}  // namespace

KVCacheMetricsCollector::KVCacheMetricsCollector(double sample_rate, std::uint64_t seed)
    : sample_rate_(sample_rate), random_state_(seed) {
  PAGED_KV_CHECK(sample_rate > 0.0 && sample_rate <= 1.0, "sample_rate must be in (0, 1], got ",
                 sample_rate);
}

void KVCacheMetricsCollector::on_block_allocated(BlockId block) noexcept {
  if (!is_sampled()) return;
  watch(block, [&] {
    const Clock::time_point now = Clock::now();
    lives_[block] = Life{now, now, {}};
  });
}

void KVCacheMetricsCollector::on_block_accessed(BlockId block) noexcept {
  const auto it = lives_.find(block);
  if (it == lives_.end()) return;
  watch(block, [&] {
    Life& life = it->second;
    life.last_access = Clock::now();
    life.accesses.push_back(life.last_access);
    if (life.accesses.size() > kMaxAccesses) life.accesses.pop_front();
  });
}

void KVCacheMetricsCollector::on_block_evicted(BlockId block) noexcept {
  watch(block, [&] { end_life(block); });
}

// The sample does without a block whose life there is no memory to keep.
template <class Note>
void KVCacheMetricsCollector::watch(BlockId block, Note note) noexcept {
  try {
    note();
  } catch (const std::bad_alloc&) {
    lives_.erase(block);
  }
}

void KVCacheMetricsCollector::end_life(BlockId block) {
  const auto it = lives_.find(block);
  if (it == lives_.end()) return;
  const Life& life = it->second;
  const Clock::time_point now = Clock::now();
  KVCacheEvictionEvent event{seconds(now - life.birth), seconds(now - life.last_access), {}};
  for (std::size_t i = 1; i < life.accesses.size(); ++i) {
    event.reuse_gaps_seconds.push_back(seconds(life.accesses[i] - life.accesses[i - 1]));
  }
  events_.push_back(std::move(event));
  lives_.erase(it);
}

void KVCacheMetricsCollector::reset() {
  lives_.clear();
  events_.clear();
}

std::vector<KVCacheEvictionEvent> KVCacheMetricsCollector::drain_events() {
  return std::exchange(events_, {});
}

// SplitMix64: any seed will do, 0 too.
bool KVCacheMetricsCollector::is_sampled() noexcept {
  std::uint64_t z = random_state_ += 0x9e3779b97f4a7c15U;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
  z ^= z >> 31;
  return static_cast<double>(z >> 11) * 0x1.0p-53 < sample_rate_;
}

}  // namespace paged_kv
