// SPDX-License-Identifier: Apache-2.0
#include "ops/params/block_mapping.h"
#include "paged_kv/cuda/block_copy.h"
#include "paged_kv/cuda/launch.h"

#include <cstdint>

namespace paged_kv::cuda {
namespace {

// How many pairs from `first` on go on where the one before them ended, on both sides.
[[nodiscard]] std::int64_t run_length(BlockMapping mapping, std::int64_t first) {
  std::int64_t length = 1;
  while (first + length < mapping.num_rows &&
         mapping(first + length, 0) == mapping(first, 0) + length &&
         mapping(first + length, 1) == mapping(first, 1) + length) {
    ++length;
  }
  return length;
}

}  // namespace

void swap_blocks(BlockPoolBytes<const std::byte> src, BlockPoolBytes<std::byte> dst,
                 std::int64_t block_size_bytes, BlockMapping mapping, cudaStream_t stream) {
  check_swap_mapping(mapping, src.num_blocks, dst.num_blocks);
  for (std::int64_t first = 0; first < mapping.num_rows;) {
    const std::int64_t length = run_length(mapping, first);
    check_cuda(cudaMemcpyAsync(dst.data + mapping(first, 1) * block_size_bytes,
                               src.data + mapping(first, 0) * block_size_bytes,
                               static_cast<std::size_t>(length * block_size_bytes),
                               cudaMemcpyDefault, stream),
               "copy of blocks");
    first += length;
  }
}

}  // namespace paged_kv::cuda
