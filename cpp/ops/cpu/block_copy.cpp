// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/block_copy.h"

#include "ops/params/block_mapping.h"
#include "paged_kv/check.h"

#include <cstring>
#include <unordered_set>
#include <utility>

namespace paged_kv::cpu {
void copy_blocks(std::span<const BlockedCache> caches, BlockMapping mapping,
                 const ThreadRunner& runner) {
  const std::unordered_set<std::int64_t> destinations = distinct_destinations(mapping);
  for (std::int64_t pair = 0; pair < mapping.num_rows; ++pair) {
    PAGED_KV_CHECK(!destinations.contains(mapping(pair, 0)),
                   "block_mapping: expected no block as both source and destination, got ",
                   mapping(pair, 0));
    for (const BlockedCache& cache : caches) {
      check_block_id(mapping(pair, 0), cache.num_blocks, pair, "source");
      check_block_id(mapping(pair, 1), cache.num_blocks, pair, "destination");
    }
  }
  if (caches.empty() || mapping.num_rows == 0) {
    return;
  }
  auto copy_range = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const BlockedCache& cache = caches[static_cast<std::size_t>(i / mapping.num_rows)];
      const std::int64_t pair = i % mapping.num_rows;
      cache.shape.copy(cache.data + mapping(pair, 0) * cache.block_stride_bytes,
                       cache.data + mapping(pair, 1) * cache.block_stride_bytes);
    }
  };
  const auto num_caches = static_cast<std::int64_t>(caches.size());
  parallel_for(runner, num_caches * mapping.num_rows, copies_per_task(caches[0].shape.num_bytes()),
               std::move(copy_range));
}

void swap_blocks(BlockPoolBytes<const std::byte> src, BlockPoolBytes<std::byte> dst,
                 std::int64_t block_size_bytes, BlockMapping mapping, const ThreadRunner& runner) {
  check_swap_mapping(mapping, src.num_blocks, dst.num_blocks);
  auto copy_range = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t pair = begin; pair < end; ++pair) {
      std::memcpy(dst.data + mapping(pair, 1) * block_size_bytes,
                  src.data + mapping(pair, 0) * block_size_bytes,
                  static_cast<std::size_t>(block_size_bytes));
    }
  };
  parallel_for(runner, mapping.num_rows, copies_per_task(block_size_bytes), std::move(copy_range));
}

}  // namespace paged_kv::cpu
