// SPDX-License-Identifier: Apache-2.0
//
// Shared memory of a block, by type instead of by declaration, so that the CPU emulation of kernels
// can give it guards and poison.
//
//   struct Shared { float logits[kNumWarps][kMaxTokens]; float row_max[kNumWarps]; };
//   Shared& shared = static_shared<Shared>();
//   float* logits = dynamic_shared<float>();   // size: shared_bytes of launch()
#pragma once

#include <type_traits>

#include <cuda_runtime.h>

#if defined(PAGED_KV_SIMT)
#include "simt/shared_storage.h"
#else

namespace paged_kv::cuda {

// One object per block and per <T, Tag>, uninitialised; the same for every thread that asks. Two
// arrays of one type need two tags: static_shared<float[32], struct RowMax>().
template <class T, class Tag = T>
[[nodiscard]] __device__ __forceinline__ T& static_shared() {
  static_assert(std::is_trivially_default_constructible_v<T>);
  __shared__ T storage;
  return storage;
}

// The dynamic shared memory of the launch, 128-byte aligned.
template <class T>
[[nodiscard]] __device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char dynamic_shared_bytes[];
  return reinterpret_cast<T*>(dynamic_shared_bytes);
}

}  // namespace paged_kv::cuda

#endif
