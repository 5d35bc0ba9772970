// SPDX-License-Identifier: Apache-2.0
#include "simt/async_copy.h"

#include "block.h"

#include <cstdint>

namespace paged_kv::simt {

bool issue_async_copy(const AsyncCopy& copy, Location location) {
  const auto alignment = static_cast<std::uintptr_t>(copy.num_bytes);
  if (reinterpret_cast<std::uintptr_t>(copy.dst) % alignment != 0 ||
      reinterpret_cast<std::uintptr_t>(copy.src) % alignment != 0) {
    fail("cp.async of " + std::to_string(copy.num_bytes) + " bytes between misaligned addresses",
         location);
  }
  if (block().schedule().async_copy == AsyncCopyMode::kEager) return true;
  AsyncCopyQueue& queue = block().running().copies;
  if (queue.count == AsyncCopyQueue::kCapacity) {
    fail("more than 256 copies of one thread are in flight: is there a wait?", location);
  }
  const int last = (queue.first + queue.count++) % AsyncCopyQueue::kCapacity;
  queue.entries[static_cast<std::size_t>(last)] = {copy, queue.num_committed_groups};
  return false;
}

void commit_async_copies() { ++block().running().copies.num_committed_groups; }

bool next_due_async_copy(int max_pending_groups, AsyncCopy* copy) {
  AsyncCopyQueue& queue = block().running().copies;
  if (queue.count == 0) return false;
  const AsyncCopyQueue::Entry& oldest = queue.entries[static_cast<std::size_t>(queue.first)];
  if (oldest.group >= queue.num_committed_groups - max_pending_groups) return false;
  *copy = oldest.copy;
  queue.first = (queue.first + 1) % AsyncCopyQueue::kCapacity;
  --queue.count;
  return true;
}

}  // namespace paged_kv::simt
