// SPDX-License-Identifier: Apache-2.0
//
// Copies whole blocks: inside caches (copy_blocks: copy-on-write, forks) and between two pools
// (swap_blocks: offload and back).
//
// Common contract: every block id is checked before the first byte is written; a bad one is a
// std::invalid_argument and changes nothing. Bytes are copied, so any dtype will do.
//
// Source: vLLM csrc/cache_kernels.cu::copy_blocks and swap_blocks (the contract); that a
// destination may not also be a source is our rule: pairs run in parallel.
#pragma once

#include "ops/cpu/thread_runner.h"
#include "paged_kv/strided_view.h"

#include <cstdint>
#include <span>
#include <vector>

namespace paged_kv::cpu {

// What one block looks like inside a cache, as the fewest runs of contiguous bytes.
class BlockShape {
 public:
  // `sizes` and `strides` (elements, not negative) are those of the cache without its first, the
  // block dimension. Dimensions that continue each other in memory are merged.
  BlockShape(std::span<const std::int64_t> sizes, std::span<const std::int64_t> strides,
             std::int64_t element_size);

  [[nodiscard]] std::int64_t run_bytes() const noexcept { return run_bytes_; }
  [[nodiscard]] std::int64_t num_runs() const noexcept { return num_runs_; }
  [[nodiscard]] std::int64_t num_bytes() const noexcept { return num_runs_ * run_bytes_; }

  // Cost: num_runs() memcpys of run_bytes().
  void copy(const std::byte* src, std::byte* dst) const;

 private:
  struct Dim {
    std::int64_t size;
    std::int64_t stride_bytes;
  };
  std::vector<Dim> outer_;  // from the largest stride to the smallest
  std::int64_t run_bytes_;
  std::int64_t num_runs_ = 1;
};

// One cache tensor, its first dimension the block.
struct BlockedCache {
  std::byte* data;
  std::int64_t num_blocks;
  std::int64_t block_stride_bytes;
  BlockShape shape;
};

// Pairs (src, dst) of block ids: [num_pairs, 2].
using BlockMapping = MatrixView<const std::int64_t>;

// Copies block src to block dst for every pair, in every cache. A dst may not appear twice, nor
// also be a src. Parallel over caches and pairs.
void copy_blocks(std::span<const BlockedCache> caches, BlockMapping block_mapping,
                 const ThreadRunner& runner);

// A pool of blocks of block_size_bytes, one after the other.
template <class Byte>
struct BlockPoolBytes {
  Byte* data;
  std::int64_t num_blocks;
};

// Copies block src of `src` to block dst of `dst` for every pair. The two do not overlap. A dst
// may not appear twice. Parallel over pairs.
void swap_blocks(BlockPoolBytes<const std::byte> src, BlockPoolBytes<std::byte> dst,
                 std::int64_t block_size_bytes, BlockMapping block_mapping,
                 const ThreadRunner& runner);

}  // namespace paged_kv::cpu
