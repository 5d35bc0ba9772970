// SPDX-License-Identifier: Apache-2.0
//
// cp.async: copies from global to shared memory that the thread waits for in groups.
// paged_kv/cuda/ptx.cuh offers it to kernels.
#pragma once

#include "simt/thread.h"

#include <cstddef>

namespace paged_kv::simt {

struct AsyncCopy {
  unsigned char* dst;
  const unsigned char* src;
  int num_bytes;
  int num_src_bytes;  // the rest of dst becomes zero
};

// True if the caller is to copy now (AsyncCopyMode::kEager); otherwise queued.
[[nodiscard]] bool issue_async_copy(const AsyncCopy& copy, Location location);
void commit_async_copies();
// The next queued copy that a wait for all but the newest `max_pending_groups` groups completes;
// false if there is none left.
[[nodiscard]] bool next_due_async_copy(int max_pending_groups, AsyncCopy* copy);

// In the kernel's own translation unit, so that sanitizers see the accesses.
inline void perform_async_copy(const AsyncCopy& copy) {
  for (int i = 0; i < copy.num_bytes; ++i) {
    const unsigned char value = i < copy.num_src_bytes ? copy.src[i] : 0;
    static_cast<volatile unsigned char*>(copy.dst)[i] = value;
  }
}

}  // namespace paged_kv::simt
