// SPDX-License-Identifier: Apache-2.0
//
// The host side of CUDA's runtime API that launchers use: cudaLaunchKernelEx runs the kernel at
// once, on the calling thread, and returns when the grid is done. Errors that the real call reports
// come back as cudaError_t; bugs inside a kernel are thrown as paged_kv::simt::KernelError.
#pragma once

#include "simt/thread.h"

#include <cstddef>
#include <tuple>
#include <utility>

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidDevice = 101,
};
const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
// The last error of a call on this thread, then success.
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();

struct SimtStream;
using cudaStream_t = SimtStream*;
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaDeviceSynchronize();

enum cudaDeviceAttr {
  cudaDevAttrMaxThreadsPerBlock = 1,
  cudaDevAttrMaxSharedMemoryPerBlock = 8,
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);

enum cudaMemcpyKind {
  cudaMemcpyHostToHost,
  cudaMemcpyHostToDevice,
  cudaMemcpyDeviceToHost,
  cudaMemcpyDeviceToDevice,
  cudaMemcpyDefault,
};
cudaError_t cudaMemcpyAsync(void* dst, const void* src, std::size_t num_bytes, cudaMemcpyKind kind,
                            cudaStream_t stream = nullptr);
cudaError_t cudaMemsetAsync(void* dst, int value, std::size_t num_bytes,
                            cudaStream_t stream = nullptr);

enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributePreferredSharedMemoryCarveout = 9,
};

enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization = 6 };
union cudaLaunchAttributeValue {
  int programmaticStreamSerializationAllowed;
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  cudaLaunchAttributeValue val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim;
  dim3 blockDim;
  std::size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned int numAttrs = 0;
};

namespace paged_kv::simt {

// The body of one thread.
struct KernelCall {
  void (*invoke)(void* arguments);
  void* arguments;
};
cudaError_t launch_grid(const cudaLaunchConfig_t& config, const void* kernel, KernelCall call);
cudaError_t set_function_attribute(const void* kernel, cudaFuncAttribute attribute, int value);

}  // namespace paged_kv::simt

template <class... Params>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Params...), cudaFuncAttribute attribute,
                                 int value) {
  return paged_kv::simt::set_function_attribute(reinterpret_cast<const void*>(kernel), attribute,
                                                value);
}

// The arguments are converted to the kernel's parameter types once; each thread gets its own copy.
template <class... Params, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               Args&&... args) {
  std::tuple<Params...> parameters{static_cast<Params>(std::forward<Args>(args))...};
  auto run_thread = [&] { std::apply(kernel, parameters); };
  const paged_kv::simt::KernelCall call{
      .invoke = [](void* body) { (*static_cast<decltype(run_thread)*>(body))(); },
      .arguments = &run_thread};
  return paged_kv::simt::launch_grid(*config, reinterpret_cast<const void*>(kernel), call);
}
