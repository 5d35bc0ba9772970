// SPDX-License-Identifier: Apache-2.0
#include "simt/host_api.h"

#include "block.h"
#include "simt/shared.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <vector>

namespace {

thread_local cudaError_t last_error = cudaSuccess;

cudaError_t remember(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

}  // namespace

namespace paged_kv::simt {
namespace {

constexpr std::size_t kDefaultMaxDynamicBytes = 48 * 1024;

std::mutex launch_mutex;
thread_local bool is_launching = false;                // on this OS thread
std::map<const void*, std::size_t> max_dynamic_bytes;  // by kernel; guarded by launch_mutex

bool is_valid_block(dim3 dim) {
  const std::uint64_t num_threads = std::uint64_t{dim.x} * dim.y * dim.z;
  return num_threads >= 1 && num_threads <= kMaxThreadsPerBlock && dim.z <= 64;
}

bool is_valid_grid(dim3 dim) {
  return dim.x >= 1 && dim.x <= 0x7fffffffu && dim.y >= 1 && dim.y <= 65535 && dim.z >= 1 &&
         dim.z <= 65535;
}

std::size_t max_dynamic_bytes_of(const void* kernel) {
  const auto found = max_dynamic_bytes.find(kernel);
  return found == max_dynamic_bytes.end() ? kDefaultMaxDynamicBytes : found->second;
}

// The order in which blocks run: as the threads of a block. Shuffled in pieces, so that a huge grid
// needs no huge list.
class BlockOrder {
 public:
  BlockOrder(std::uint64_t num_blocks, const Options& schedule)
      : num_blocks_(num_blocks), order_(schedule.order), random_(schedule.seed) {}

  [[nodiscard]] std::uint64_t at(std::uint64_t position) {
    if (order_ == ThreadOrder::kFifo) return position;
    if (order_ == ThreadOrder::kLifo) return num_blocks_ - 1 - position;
    const std::uint64_t piece_start = position / kPieceSize * kPieceSize;
    if (position == piece_start) shuffle_piece(piece_start);
    return piece_[static_cast<std::size_t>(position - piece_start)];
  }

 private:
  static constexpr std::uint64_t kPieceSize = 4096;

  void shuffle_piece(std::uint64_t start) {
    piece_.resize(static_cast<std::size_t>(std::min(kPieceSize, num_blocks_ - start)));
    std::iota(piece_.begin(), piece_.end(), start);
    for (std::size_t i = piece_.size() - 1; i > 0; --i) {
      std::swap(piece_[i],
                piece_[static_cast<std::size_t>(random_.below(static_cast<int>(i) + 1))]);
    }
  }

  std::uint64_t num_blocks_;
  ThreadOrder order_;
  RandomSequence random_;
  std::vector<std::uint64_t> piece_;
};

void run_blocks(const cudaLaunchConfig_t& config, KernelCall call) {
  const dim3 grid = config.gridDim;
  const std::uint64_t num_blocks = std::uint64_t{grid.x} * grid.y * grid.z;
  BlockOrder order(num_blocks, block().schedule());
  for (std::uint64_t position = 0; position < num_blocks; ++position) {
    const std::uint64_t index = order.at(position);
    const uint3 block_idx{static_cast<unsigned>(index % grid.x),
                          static_cast<unsigned>(index / grid.x % grid.y),
                          static_cast<unsigned>(index / grid.x / grid.y)};
    block().run({block_idx, config.blockDim, grid}, call,
                RandomSequence(block().schedule().seed + index));
  }
}

}  // namespace

void* static_shared_storage(const void* key, std::size_t num_bytes, std::size_t alignment,
                            const char* name, Location location) {
  return block().shared().static_array(key, num_bytes, alignment, name, location);
}

void* dynamic_shared_storage(std::size_t alignment, Location location) {
  return block().shared().dynamic(alignment, location);
}

cudaError_t launch_grid(const cudaLaunchConfig_t& config, const void* kernel, KernelCall call) {
  if (is_launching) fail("a kernel launches a kernel", Location::current());
  const std::lock_guard lock(launch_mutex);
  if (!is_valid_block(config.blockDim) || !is_valid_grid(config.gridDim)) {
    return remember(cudaErrorInvalidConfiguration);
  }
  if (config.dynamicSmemBytes > max_dynamic_bytes_of(kernel)) {
    return remember(cudaErrorInvalidValue);
  }
  const dim3 dim = config.blockDim;
  block().begin_launch(static_cast<int>(dim.x * dim.y * dim.z), config.dynamicSmemBytes);
  is_launching = true;
  std::exception_ptr error;
  try {
    run_blocks(config, call);
  } catch (...) {
    error = std::current_exception();
  }
  is_launching = false;
  block().end_launch();
  if (error != nullptr) std::rethrow_exception(error);
  return cudaSuccess;
}

cudaError_t set_function_attribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  const std::lock_guard lock(launch_mutex);
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || value > options().max_shared_bytes) return remember(cudaErrorInvalidValue);
  max_dynamic_bytes[kernel] = static_cast<std::size_t>(value);
  return cudaSuccess;
}

}  // namespace paged_kv::simt

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorInvalidConfiguration:
      return "cudaErrorInvalidConfiguration";
    case cudaErrorInvalidDevice:
      return "cudaErrorInvalidDevice";
  }
  return "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
  }
  return "unrecognized error code";
}

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device != 0) return remember(cudaErrorInvalidDevice);
  const paged_kv::simt::Options& options = paged_kv::simt::options();
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      *value = paged_kv::simt::kMaxThreadsPerBlock;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = 48 * 1024;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = options.num_multiprocessors;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = options.max_shared_bytes;
      return cudaSuccess;
  }
  return remember(cudaErrorInvalidValue);
}

cudaError_t cudaMemcpyAsync(void* dst, const void* src, std::size_t num_bytes, cudaMemcpyKind,
                            cudaStream_t) {
  if (num_bytes > 0) std::memcpy(dst, src, num_bytes);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* dst, int value, std::size_t num_bytes, cudaStream_t) {
  if (num_bytes > 0) std::memset(dst, value, num_bytes);
  return cudaSuccess;
}
