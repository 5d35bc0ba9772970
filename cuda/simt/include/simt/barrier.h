// SPDX-License-Identifier: Apache-2.0
//
// __syncthreads and its variants, and memory fences.
//
// All threads of a block that have not returned must meet at the same call (file, line, column);
// otherwise the launch throws "divergent __syncthreads" or "deadlock".
#pragma once

#include "simt/thread.h"

namespace paged_kv::simt {

struct BarrierVotes {
  int count;
  bool all;
  bool any;
};
BarrierVotes block_barrier(bool predicate, const char* name, Location location);

// For TSan: a fence before an atomic publishes, a fence after one receives. Nothing elsewhere.
void memory_fence();

}  // namespace paged_kv::simt

inline void __syncthreads(paged_kv::simt::Location location = paged_kv::simt::Location::current()) {
  paged_kv::simt::block_barrier(false, "__syncthreads", location);
}
inline int __syncthreads_count(
    int predicate, paged_kv::simt::Location location = paged_kv::simt::Location::current()) {
  return paged_kv::simt::block_barrier(predicate != 0, "__syncthreads_count", location).count;
}
inline int __syncthreads_and(
    int predicate, paged_kv::simt::Location location = paged_kv::simt::Location::current()) {
  return paged_kv::simt::block_barrier(predicate != 0, "__syncthreads_and", location).all;
}
inline int __syncthreads_or(
    int predicate, paged_kv::simt::Location location = paged_kv::simt::Location::current()) {
  return paged_kv::simt::block_barrier(predicate != 0, "__syncthreads_or", location).any;
}
inline void __threadfence() { paged_kv::simt::memory_fence(); }
inline void __threadfence_block() { paged_kv::simt::memory_fence(); }
inline void __threadfence_system() { paged_kv::simt::memory_fence(); }
