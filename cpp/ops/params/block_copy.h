// SPDX-License-Identifier: Apache-2.0
//
// Copies whole blocks: inside caches (copy_blocks: copy-on-write, forks) and between two pools
// (swap_blocks: offload and back). Bytes are copied, so any dtype will do.
//
// Source: vLLM csrc/cache_kernels.cu::copy_blocks and swap_blocks (the contract); that a
// destination may not also be a source is our rule: pairs run in parallel.
#pragma once

#include "paged_kv/strided_view.h"

#include <cstdint>

namespace paged_kv {

// Pairs (src, dst) of block ids: [num_pairs, 2].
using BlockMapping = MatrixView<const std::int64_t>;

// A pool of blocks of block_size_bytes, one after the other.
template <class Byte>
struct BlockPoolBytes {
  Byte* data;
  std::int64_t num_blocks;
};

}  // namespace paged_kv
