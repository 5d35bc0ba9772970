// SPDX-License-Identifier: Apache-2.0
//
// Copies of whole blocks on the device. Contracts: ops/params/block_copy.h.
#pragma once

#include "ops/params/block_copy.h"
#include "ops/params/block_shape.h"

#include <cstddef>
#include <cstdint>
#include <span>

#include <cuda_runtime.h>

namespace paged_kv::cuda {

// Copies block src to block dst for every pair, in every cache. Caches and mapping are device
// memory, so ids are not checked: a pair with an id that a cache does not have is left out there. A
// dst that appears twice or is also a src gets a mixture.
//
// One launch for each 64 caches of one geometry: their addresses travel with the launch, so nothing
// is uploaded and a captured graph keeps them. Copies 16 bytes at a time where addresses, strides
// and sizes are multiples of that, else 4 or 1.
//
// Throws std::invalid_argument: a block with more than kMaxBlockCopyDims dimensions that do not
// continue each other in memory, or of more than 2^31 bytes.
inline constexpr int kMaxBlockCopyDims = 4;
void copy_blocks(std::span<const BlockedCache> caches, BlockMapping block_mapping,
                 cudaStream_t stream);

// Copies block src of `src` to block dst of `dst` for every pair, in the order of `stream`. Either
// side may be host or device memory; what is host memory has to live, unchanged, until the stream
// is past the copy, and should be pinned: else the driver copies it through a buffer of its own
// while the host waits. `block_mapping` is host memory and read before the call returns. Pairs that
// go on where the one before them ended are one copy.
//
// Throws std::invalid_argument: a block id out of range, a dst twice; nothing was copied.
void swap_blocks(BlockPoolBytes<const std::byte> src, BlockPoolBytes<std::byte> dst,
                 std::int64_t block_size_bytes, BlockMapping block_mapping, cudaStream_t stream);

}  // namespace paged_kv::cuda
