// SPDX-License-Identifier: Apache-2.0
//
// The only home of inline PTX. cuda/simt/include/simt/ptx.h has the same functions in C++.
//
// Pointers into shared memory are ordinary pointers here; they must be aligned to the access.
#pragma once

#include <cuda_runtime.h>

#if defined(PAGED_KV_SIMT)
#include "simt/ptx.h"
#else

#include <cstdint>

namespace paged_kv::cuda::ptx {

// 2^x with at most 2 ulp of error; subnormal results become zero.
[[nodiscard]] __device__ __forceinline__ float exp2_approx(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// 16 bytes that nobody writes during the kernel and that are not read again soon: past L1.
[[nodiscard]] __device__ __forceinline__ uint4 load_streaming(const uint4* address) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}

// 8 bytes, likewise.
[[nodiscard]] __device__ __forceinline__ uint2 load_streaming(const uint2* address) {
  uint2 value;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(value.x), "=r"(value.y)
               : "l"(address));
  return value;
}

[[nodiscard]] __device__ __forceinline__ std::uint32_t shared_address(const void* shared) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
}

// Starts a copy of 16 bytes from global to shared memory; bytes from `num_src_bytes` on become zero
// and are not read. The thread sees them after a wait, the block after a barrier behind it.
__device__ __forceinline__ void cp_async_16(void* shared_dst, const void* global_src,
                                            int num_src_bytes = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared_dst)),
               "l"(global_src), "r"(num_src_bytes)
               : "memory");
}

// The copies started since the last commit become one group, even if there are none.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits for all groups of this thread but the newest kMaxPending.
template <int kMaxPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kMaxPending) : "memory");
}

}  // namespace paged_kv::cuda::ptx

#endif
