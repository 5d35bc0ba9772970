// SPDX-License-Identifier: Apache-2.0
#include "cuda/ops/current_stream.h"
#include "ops/block_copy_checks.h"
#include "ops/boxed.h"
#include "ops/registration.h"
#include "paged_kv/cuda/block_copy.h"

#include <cstdint>
#include <utility>
#include <vector>

namespace paged_kv::cuda {
namespace {

void copy_blocks_op(const std::vector<Tensor>& key_caches, const std::vector<Tensor>& value_caches,
                    const Tensor& block_mapping) {
  const CopyBlocksArguments args =
      checked_copy_blocks(kOpDevice, key_caches, value_caches, block_mapping);
  const CurrentStream current(block_mapping);
  copy_blocks(args.caches, args.block_mapping, current.stream());
}

// CPU to CUDA, CUDA to CPU, or inside one CUDA device. Returns a tensor on that device.
const Tensor& checked_swap_device(const Tensor& src, const Tensor& dst) {
#if defined(PAGED_KV_EMULATED_OPS)
  NamedSizes sizes;  // device memory is CPU memory
  (void)check(src, "src", sizes);
  (void)check(dst, "dst", sizes);
  return dst;
#else
  for (const auto& [tensor, name] : {std::pair{&src, "src"}, std::pair{&dst, "dst"}}) {
    PAGED_KV_CHECK(tensor->is_cpu() || tensor->is_cuda(), name, ": expected a CPU or CUDA tensor");
  }
  PAGED_KV_CHECK(src.is_cuda() || dst.is_cuda(),
                 "block_mapping: expected a CPU tensor, like src and dst");
  PAGED_KV_CHECK(src.is_cpu() || dst.is_cpu() || src.get_device_index() == dst.get_device_index(),
                 "dst: expected a tensor on the CPU or on cuda:", src.get_device_index(),
                 ", like src, got one on cuda:", dst.get_device_index());
  return dst.is_cuda() ? dst : src;
#endif
}

void swap_blocks_op(const Tensor& src, const Tensor& dst, std::int64_t block_size_in_bytes,
                    const Tensor& block_mapping) {
  const Tensor& on_device = checked_swap_device(src, dst);
  const SwapBlocksArguments args =
      checked_swap_blocks(src, dst, block_size_in_bytes, block_mapping);
  const CurrentStream current(on_device);
  swap_blocks(args.src, args.dst, block_size_in_bytes, args.block_mapping, current.stream());
}

}  // namespace

PAGED_KV_CUDA_OPS(m) {
  m.impl("copy_blocks", PAGED_KV_BOX(&copy_blocks_op));
  m.impl("swap_blocks", PAGED_KV_BOX(&swap_blocks_op));
}

}  // namespace paged_kv::cuda
