// SPDX-License-Identifier: Apache-2.0
#include "block.h"
#include "places.h"
#include "sanitizers.h"

namespace paged_kv::simt {

BarrierVotes block_barrier(bool predicate, const char* name, Location location) {
  return block().wait_at_barrier(predicate, name, location);
}

BarrierVotes Block::wait_at_barrier(bool predicate, const char* name, Location location) {
  Thread& self = running();
  self.location = location;
  if (barrier_.num_waiting == 0) {
    barrier_.name = name;
    barrier_.location = location;
    barrier_.votes = {.count = 0, .all = true, .any = false};
  } else if (barrier_.name != name || !same_place(barrier_.location, location)) {
    fail("divergent __syncthreads: thread " + std::to_string(self.index) + " is at " + name + ", " +
             to_string(location) + "; others wait at " + barrier_.name + ", " +
             to_string(barrier_.location),
         location);
  }
  ++barrier_.num_waiting;
  barrier_.votes.count += predicate ? 1 : 0;
  barrier_.votes.all &= predicate;
  barrier_.votes.any |= predicate;

  self.activity = Activity::kAtBarrier;
  self.waits_in = name;
  const unsigned parity = barrier_.generation % 2;
  tokens_.release(static_cast<int>(parity));
  complete_barrier_if_full();
  wait_for_turn();
  tokens_.acquire(static_cast<int>(parity));
  return barrier_.results[parity];
}

void Block::complete_barrier_if_full() {
  if (barrier_.num_waiting == 0 || barrier_.num_waiting < num_live_) return;
  shared_.check_guards(barrier_.location);
  barrier_.results[barrier_.generation % 2] = barrier_.votes;
  ++barrier_.generation;
  barrier_.num_waiting = 0;
  for (int i = 0; i < num_threads_; ++i) {
    Thread& thread = threads_[to_index(i)];
    if (thread.activity == Activity::kAtBarrier) make_ready(thread);
  }
}

// C++'s rule for fences: what comes before a fence is seen by a thread that, after an atomic access
// of its own to the same address as a later atomic of the fencing thread, fences too.
void memory_fence() {
  if (!sanitizer::kThread) return;
  Thread& self = block().running();
  self.has_fenced = true;
  if (self.last_atomic != nullptr) sanitizer::tsan_acquire(self.last_atomic);
}

void before_atomic(const void* address) {
  if (!sanitizer::kThread) return;
  if (block().running().has_fenced) sanitizer::tsan_release(address);
}

void after_atomic(const void* address) {
  if (!sanitizer::kThread) return;
  block().running().last_atomic = address;
}

}  // namespace paged_kv::simt
