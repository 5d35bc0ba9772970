// SPDX-License-Identifier: Apache-2.0
//
// copy_blocks and swap_blocks on the CPU. Contract: ops/params/block_copy.h. In addition every
// block id is checked before the first byte is written; a bad one is a std::invalid_argument and
// changes nothing.
#pragma once

#include "ops/cpu/thread_runner.h"
#include "ops/params/block_copy.h"
#include "ops/params/block_shape.h"

#include <cstdint>
#include <span>

namespace paged_kv::cpu {

// Copies block src to block dst for every pair, in every cache. A dst may not appear twice, nor
// also be a src. Parallel over caches and pairs.
void copy_blocks(std::span<const BlockedCache> caches, BlockMapping block_mapping,
                 const ThreadRunner& runner);

// Copies block src of `src` to block dst of `dst` for every pair. The two do not overlap. A dst
// may not appear twice. Parallel over pairs.
void swap_blocks(BlockPoolBytes<const std::byte> src, BlockPoolBytes<std::byte> dst,
                 std::int64_t block_size_bytes, BlockMapping block_mapping,
                 const ThreadRunner& runner);

}  // namespace paged_kv::cpu
