// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ops/tensor_checks.h"

#include <cuda_runtime.h>

#include <torch/csrc/stable/accelerator.h>

namespace paged_kv::cuda {

#if defined(PAGED_KV_EMULATED_OPS)
inline constexpr OpDevice kOpDevice = OpDevice::kCpu;
#else
inline constexpr OpDevice kOpDevice = OpDevice::kCuda;
#endif

// While it lives, the device of `tensor` is the current one. stream() is torch's current stream
// there. Make it after the tensors were checked and before the launch.
class CurrentStream {
 public:
  // Throws std::runtime_error if torch has no CUDA.
  explicit CurrentStream(const Tensor& tensor);

  [[nodiscard]] cudaStream_t stream() const noexcept { return stream_; }

 private:
#if !defined(PAGED_KV_EMULATED_OPS)
  torch::stable::accelerator::DeviceGuard guard_;
#endif
  cudaStream_t stream_ = nullptr;
};

}  // namespace paged_kv::cuda
