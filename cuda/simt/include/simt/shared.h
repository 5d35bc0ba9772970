// SPDX-License-Identifier: Apache-2.0
//
// Shared memory of a block, as cuda/include/paged_kv/cuda/shared.cuh offers it to kernels.
//
// Filled with 0xff before each block: NaN in every float type, -1 in every integer. After each
// array lies a guard: under ASan any access to it is an error; without, writes are found at the
// next barrier or at the end of the block.
#pragma once

#include "simt/thread.h"

#include <cstddef>

namespace paged_kv::simt {

// The storage of one static shared array in the running block. `key` tells arrays apart.
[[nodiscard]] void* static_shared_storage(const void* key, std::size_t num_bytes,
                                          std::size_t alignment, const char* name,
                                          Location location);

// The dynamic shared memory, 128-byte aligned; `num_bytes` is how much the kernel says it uses.
[[nodiscard]] void* dynamic_shared_storage(std::size_t alignment, Location location);

}  // namespace paged_kv::simt
