// SPDX-License-Identifier: Apache-2.0
#include "ops/block_copy_checks.h"
#include "ops/boxed.h"
#include "ops/cpu/block_copy.h"
#include "ops/registration.h"
#include "ops/torch_thread_runner.h"

#include <cstdint>
#include <vector>

namespace paged_kv {
namespace {

void copy_blocks(const std::vector<Tensor>& key_caches, const std::vector<Tensor>& value_caches,
                 const Tensor& block_mapping) {
  const CopyBlocksArguments args =
      checked_copy_blocks(OpDevice::kCpu, key_caches, value_caches, block_mapping);
  cpu::copy_blocks(args.caches, args.block_mapping, kTorchRunner);
}

void swap_blocks(const Tensor& src, const Tensor& dst, std::int64_t block_size_in_bytes,
                 const Tensor& block_mapping) {
  NamedSizes sizes;
  (void)check(src, "src", sizes);  // CPU tensors
  (void)check(dst, "dst", sizes);
  const SwapBlocksArguments args =
      checked_swap_blocks(src, dst, block_size_in_bytes, block_mapping);
  cpu::swap_blocks(args.src, args.dst, block_size_in_bytes, args.block_mapping, kTorchRunner);
}

}  // namespace

PAGED_KV_CPU_OPS(m) {
  m.impl("copy_blocks", PAGED_KV_BOX(&copy_blocks));
  m.impl("swap_blocks", PAGED_KV_BOX(&swap_blocks));
}

}  // namespace paged_kv
