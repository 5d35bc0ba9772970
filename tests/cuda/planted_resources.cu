// SPDX-License-Identifier: Apache-2.0
//
// Kernels that the static gates must refuse, beside one that they must not.
#include <cuda_runtime.h>

namespace {

constexpr int kNumThreads = 1024;  // leaves 64 registers a thread
constexpr int kNumValues = 100;

}  // namespace

__global__ void __launch_bounds__(kNumThreads) spilling_kernel(const float* in, float* out) {
  float values[kNumValues];
#pragma unroll
  for (int i = 0; i < kNumValues; ++i) values[i] = in[i * kNumThreads + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kNumValues; ++i) {
    out[i * kNumThreads + threadIdx.x] = values[kNumValues - 1 - i] * values[i / 2];
  }
}

__global__ void __launch_bounds__(kNumThreads) local_array_kernel(const int* in, int* out) {
  int counts[16] = {};
  for (int i = 0; i < 64; ++i) ++counts[in[i] & 15];  // a register has no address
  out[threadIdx.x] = counts[in[threadIdx.x] & 15];
}

__global__ void __launch_bounds__(kNumThreads) scalar_copy_kernel(const float* in, float* out) {
  out[threadIdx.x] = in[threadIdx.x];
}

__global__ void __launch_bounds__(kNumThreads) vector_copy_kernel(const float4* in, float4* out) {
  out[threadIdx.x] = in[threadIdx.x];
}

__global__ void __launch_bounds__(kNumThreads) shared_kernel(const int* in, int* out) {
  __shared__ int values[kNumThreads];
  values[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = values[kNumThreads - 1 - threadIdx.x];
}
