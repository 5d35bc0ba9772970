// SPDX-License-Identifier: Apache-2.0
//
// Tiny kernels with one bug each, and the same without it (kCorrect): what the emulator must find,
// and must not complain about.
#pragma once

#include "paged_kv/cuda/ptx.cuh"
#include "paged_kv/cuda/shared.cuh"

#include <cuda_runtime.h>

namespace paged_kv::cuda::testing {

inline constexpr unsigned kFullMask = 0xffffffffu;

// Bug: no barrier between the warps' partial sums and their merge. Grid: 1. Block: (128).
template <bool kCorrect>
__global__ void merge_partial_sums_kernel(float* out) {
  struct Shared {
    float partial[4];
  };
  Shared& shared = static_shared<Shared>();
  const unsigned warp = threadIdx.x / 32;
  float sum = static_cast<float>(threadIdx.x);
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(kFullMask, sum, offset);
  if (threadIdx.x % 32 == 0) shared.partial[warp] = sum;
  if constexpr (kCorrect) __syncthreads();
  if (threadIdx.x == 0) {
    *out = shared.partial[0] + shared.partial[1] + shared.partial[2] + shared.partial[3];
  }
}

enum class PipelineBug { kNone, kNoBarrierAtLoopEnd, kNoWait };

inline constexpr int kPipelineThreads = 32;
inline constexpr int kPipelineTiles = 4;

// Sums its neighbour's part of each tile; the next tile is copied meanwhile. in: uint4
// [kPipelineTiles][kPipelineThreads], out: [kPipelineThreads]. Grid: 1. Block: (kPipelineThreads).
template <PipelineBug kBug>
__global__ void pipeline_kernel(const uint4* in, unsigned* out) {
  struct Shared {
    uint4 stages[2][kPipelineThreads];
  };
  Shared& shared = static_shared<Shared>();
  const unsigned thread = threadIdx.x;
  ptx::cp_async_16(&shared.stages[0][thread], in + thread);
  ptx::cp_async_commit();
  unsigned sum = 0;
  for (unsigned tile = 0; tile < kPipelineTiles; ++tile) {
    if (tile + 1 < kPipelineTiles) {
      ptx::cp_async_16(&shared.stages[(tile + 1) % 2][thread],
                       in + (tile + 1) * kPipelineThreads + thread);
    }
    ptx::cp_async_commit();
    if constexpr (kBug != PipelineBug::kNoWait) ptx::cp_async_wait<1>();
    __syncthreads();
    sum += shared.stages[tile % 2][(thread + 1) % kPipelineThreads].x;
    if constexpr (kBug != PipelineBug::kNoBarrierAtLoopEnd) __syncthreads();
  }
  out[thread] = sum;
}

// Bug: reads what the neighbour wrote without __syncwarp. Grid: 1. Block: (32).
template <bool kCorrect>
__global__ void read_neighbour_kernel(int* out) {
  auto& values = static_shared<int[32]>();
  values[threadIdx.x] = static_cast<int>(threadIdx.x);
  if constexpr (kCorrect) __syncwarp();
  out[threadIdx.x] = values[threadIdx.x ^ 1u];
}

// Bug: every block writes one word. Grid: any. Block: any.
template <bool kCorrect>
__global__ void count_blocks_kernel(int* out) {
  if (threadIdx.x != 0) return;
  if constexpr (kCorrect) {
    atomicAdd(out, 1);
  } else {
    *out += 1;
  }
}

// Bug: the last block to finish reads what others wrote, without fences. partial: [gridDim.x].
// Block: any.
template <bool kCorrect>
__global__ void last_block_sums_kernel(int* partial, unsigned* num_done, int* out) {
  if (threadIdx.x != 0) return;
  partial[blockIdx.x] = static_cast<int>(blockIdx.x);
  if constexpr (kCorrect) __threadfence();
  if (atomicInc(num_done, gridDim.x - 1) != gridDim.x - 1) return;
  if constexpr (kCorrect) __threadfence();
  int sum = 0;
  for (unsigned i = 0; i < gridDim.x; ++i) sum += partial[i];
  *out = sum;
}

// Bug: one element too many. `first` is 0 or 1, so that no compiler sees it. Grid: 1. Block: (32).
template <class Index>
__global__ void shift_in_shared_kernel(Index first, int* out) {
  auto& values = static_shared<int[32]>();
  int* elements = values;  // no array type: only memory checks can see the overrun
  elements[threadIdx.x + first] = 1;
  __syncthreads();
  out[threadIdx.x] = elements[threadIdx.x];
}
template <class Index>
__global__ void shift_in_shared_array_kernel(Index first, int* out) {
  auto& values = static_shared<int[32]>();
  values[threadIdx.x + first] = 1;
  __syncthreads();
  out[threadIdx.x] = values[threadIdx.x];
}

// Bug: more dynamic shared memory than the launch gave. Grid: 1. Block: any.
template <class T>
__global__ void fill_dynamic_shared_kernel(int num_elements) {
  T* elements = dynamic_shared<T>();
  for (int i = 0; i < num_elements; ++i) elements[i] = T{};
}

// Bug: one thread shuffles while the others wait for it at a barrier. Grid: 1. Block: (64).
template <bool kCorrect>
__global__ void shuffle_or_barrier_kernel(int* out) {
  int value = 0;
  if (kCorrect || threadIdx.x == 3) value = __shfl_sync(kFullMask, 1, 0);
  __syncthreads();
  out[threadIdx.x] = value;
}

// Bug: two barriers instead of one. Grid: 1. Block: (64).
template <bool kCorrect>
__global__ void barrier_in_branches_kernel(int* out) {
  if (kCorrect) {
    __syncthreads();
  } else if (threadIdx.x < 16) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = 1;
}

// Bug: the halves of a warp shuffle apart, each expecting all lanes. Grid: 1. Block: (32).
template <bool kCorrect>
__global__ void shuffle_in_branches_kernel(int* out) {
  int value = 0;
  if (kCorrect) {
    value = __shfl_xor_sync(kFullMask, 1, 1);
  } else if (threadIdx.x < 16) {
    value = __shfl_xor_sync(kFullMask, 1, 1);
  } else {
    value = __shfl_xor_sync(kFullMask, 2, 1);
  }
  out[threadIdx.x] = value;
}

// Bug: the upper half names the lower half's mask. Grid: 1. Block: (32).
template <bool kCorrect>
__global__ void half_warp_sum_kernel(int* out) {
  const unsigned mask = kCorrect && threadIdx.x >= 16 ? 0xffff0000u : 0x0000ffffu;
  int sum = static_cast<int>(threadIdx.x);
  for (int offset = 8; offset > 0; offset /= 2) sum += __shfl_xor_sync(mask, sum, offset);
  out[threadIdx.x] = sum;
}

// Bug: the last element of shared memory is never written. Grid: 1. Block: (64).
template <class T, bool kCorrect>
__global__ void partly_written_kernel(T* out) {
  auto& values = static_shared<T[64]>();
  if (kCorrect || threadIdx.x < 63) values[threadIdx.x] = T{};
  __syncthreads();
  out[threadIdx.x] = values[threadIdx.x];
}

// Bug: a lane has returned, and another reads it. Grid: 1. Block: (32).
template <bool kCorrect>
__global__ void return_before_shuffle_kernel(int* out) {
  if (!kCorrect && threadIdx.x == 5) return;
  out[threadIdx.x] = __shfl_xor_sync(kFullMask, static_cast<int>(threadIdx.x), 1);
}

// Bug: lanes of one warp wait for different sets of lanes. Grid: 1. Block: (32).
template <bool kCorrect>
__global__ void different_masks_kernel() {
  const bool upper = threadIdx.x >= 16;
  __syncwarp(kCorrect || upper ? kFullMask : 0x0001ffffu);
}

}  // namespace paged_kv::cuda::testing
