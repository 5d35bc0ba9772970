// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/cuda/shared.cuh"
#include "test_support.h"

#include <stdexcept>
#include <string>

#include <gtest/gtest.h>

namespace paged_kv::cuda::testing {
namespace {

__global__ void nothing_kernel() {}

// As an invalid launch on the device does: std::runtime_error, not KernelError, and no state left.
void expect_refused(dim3 grid, dim3 block, std::size_t shared_bytes, const std::string& reason) {
  try {
    launch(&nothing_kernel, grid, block, shared_bytes, nullptr);
    ADD_FAILURE() << "not refused";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find(reason), std::string::npos) << error.what();
  }
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST(HostApi, RefusesInvalidConfigurations) {
  const std::string reason = "cudaErrorInvalidConfiguration";
  expect_refused(dim3(0), dim3(32), 0, reason);
  expect_refused(dim3(1, 65536), dim3(32), 0, reason);
  expect_refused(dim3(1), dim3(0), 0, reason);
  expect_refused(dim3(1), dim3(1025), 0, reason);
  expect_refused(dim3(1), dim3(1, 1, 65), 0, reason);
}

TEST(HostApi, SharedMemoryBeyondTheDevice) {
  launch(&nothing_kernel, 1, 32, 227 * 1024, nullptr);
  expect_refused(dim3(1), dim3(32), 227 * 1024 + 1, "cudaErrorInvalidValue");
  const simt::ScopedOptions scope({.max_shared_bytes = 99 * 1024});
  expect_refused(dim3(1), dim3(32), 100 * 1024, "cudaErrorInvalidValue");
}

TEST(HostApi, SharedMemoryMustBeAskedFor) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1);
  config.blockDim = dim3(32);
  config.dynamicSmemBytes = 60 * 1024;
  constexpr auto kernel = +[] {};
  EXPECT_EQ(cudaLaunchKernelEx(&config, kernel), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_EQ(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 60 * 1024),
            cudaSuccess);
  EXPECT_EQ(cudaLaunchKernelEx(&config, kernel), cudaSuccess);
}

TEST(HostApi, DeviceAttributes) {
  int value = 0;
  EXPECT_EQ(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0), cudaSuccess);
  EXPECT_EQ(value, simt::options().num_multiprocessors);
  EXPECT_EQ(cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0),
            cudaSuccess);
  EXPECT_EQ(value, 227 * 1024);
  EXPECT_EQ(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 1),
            cudaErrorInvalidDevice);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
}

__global__ void launching_kernel() { launch(&nothing_kernel, 1, 1, 0, nullptr); }

TEST(HostApi, AKernelMayNotLaunch) {
  EXPECT_NE(error_of(&launching_kernel, 1, 1).find("a kernel launches a kernel"),
            std::string::npos);
  launch(&nothing_kernel, 1, 1, 0, nullptr);  // still usable
}

struct Params {
  int* out;
  int value;
};
__global__ void params_kernel(const __grid_constant__ Params params, double factor) {
  params.out[threadIdx.x] = static_cast<int>(params.value * factor);
}

TEST(HostApi, ArgumentsConvertToTheParameterTypes) {
  int out[2] = {};
  launch(&params_kernel, 1, 2, 0, nullptr, Params{.out = out, .value = 3}, 2);
  EXPECT_EQ(out[0], 6);
  EXPECT_EQ(out[1], 6);
}

}  // namespace
}  // namespace paged_kv::cuda::testing
