// SPDX-License-Identifier: Apache-2.0
//
// Checks of a block mapping that the host can read. Each throws std::invalid_argument.
#pragma once

#include "ops/params/block_copy.h"
#include "paged_kv/check.h"

#include <cstddef>
#include <cstdint>
#include <unordered_set>

namespace paged_kv {

inline void check_block_id(std::int64_t id, std::int64_t num_blocks, std::int64_t pair,
                           const char* role) {
  PAGED_KV_CHECK(id >= 0 && id < num_blocks, "block_mapping[", pair, "]: expected a ", role,
                 " block in [0, ", num_blocks, "), got ", id);
}

// The set of destinations; throws if one appears twice.
[[nodiscard]] inline std::unordered_set<std::int64_t> distinct_destinations(BlockMapping mapping) {
  std::unordered_set<std::int64_t> destinations;
  destinations.reserve(static_cast<std::size_t>(mapping.num_rows));
  for (std::int64_t pair = 0; pair < mapping.num_rows; ++pair) {
    PAGED_KV_CHECK(destinations.insert(mapping(pair, 1)).second,
                   "block_mapping: expected distinct destinations, got block ", mapping(pair, 1),
                   " twice");
  }
  return destinations;
}

inline void check_swap_mapping(BlockMapping mapping, std::int64_t num_src_blocks,
                               std::int64_t num_dst_blocks) {
  (void)distinct_destinations(mapping);
  for (std::int64_t pair = 0; pair < mapping.num_rows; ++pair) {
    check_block_id(mapping(pair, 0), num_src_blocks, pair, "source");
    check_block_id(mapping(pair, 1), num_dst_blocks, pair, "destination");
  }
}

}  // namespace paged_kv
