// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/evicted_keys.h"

#include "paged_kv/check.h"

#include <algorithm>

namespace paged_kv {

EvictedKeys::EvictedKeys(std::int32_t capacity) {
  PAGED_KV_CHECK(capacity >= 0, "num_remembered_evictions must not be negative, got ", capacity);
  ring_.resize(static_cast<std::size_t>(capacity));
  places_.reserve(ring_.size());
}

void EvictedKeys::push(const BlockHashWithGroupId& key) {
  if (ring_.empty()) return;
  const BlockId place(static_cast<std::int32_t>(next_));
  BlockHashWithGroupId& entry = ring_[next_];
  if (entry.group_id.valid()) places_.pop(entry, place);
  entry = without_content(key);
  places_.insert(entry, place);
  next_ = (next_ + 1) % ring_.size();
}

void EvictedKeys::clear() noexcept {
  std::ranges::fill(ring_, BlockHashWithGroupId{});
  places_.clear();
  next_ = 0;
}

}  // namespace paged_kv
