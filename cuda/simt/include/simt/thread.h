// SPDX-License-Identifier: Apache-2.0
//
// Who the running emulated thread is: threadIdx, blockIdx, blockDim, gridDim.
#pragma once

#include "simt/vector_types.h"

#include <source_location>
#include <stdexcept>
#include <string>

namespace paged_kv::simt {

// A place in a kernel. As a default argument it is the line that called the CUDA function.
using Location = std::source_location;

// A bug in a kernel that the emulator found; thrown by the launch. The rest of the grid does not
// run. what() tells the block, the schedule, and for each range of threads what it does and where.
class KernelError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct ThreadContext {
  uint3 thread_idx;
  int lane;
};

struct BlockContext {
  uint3 block_idx;
  dim3 block_dim;
  dim3 grid_dim;
};

// Valid inside a kernel only; current_thread_idx is current_thread->thread_idx. Plain globals: one
// launch at a time runs in a process, and all its threads run on the thread that launched it.
extern ThreadContext* current_thread;
extern uint3 current_thread_idx;
extern BlockContext current_block;

// Throws KernelError: `message`, then the state of the block.
[[noreturn]] void fail(const std::string& message, Location location);

}  // namespace paged_kv::simt

// Read-only to kernels, as on the device.
inline const uint3& threadIdx = paged_kv::simt::current_thread_idx;
inline const uint3& blockIdx = paged_kv::simt::current_block.block_idx;
inline const dim3& blockDim = paged_kv::simt::current_block.block_dim;
inline const dim3& gridDim = paged_kv::simt::current_block.grid_dim;
inline constexpr int warpSize = 32;
