// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/block_copy.h"

#include "paged_kv/check.h"

#include <algorithm>
#include <cstring>
#include <unordered_set>
#include <utility>

namespace paged_kv::cpu {
namespace {

void check_block_id(std::int64_t id, std::int64_t num_blocks, std::int64_t pair, const char* role) {
  PAGED_KV_CHECK(id >= 0 && id < num_blocks, "block_mapping[", pair, "]: expected a ", role,
                 " block in [0, ", num_blocks, "), got ", id);
}

// The set of destinations; throws if one appears twice.
std::unordered_set<std::int64_t> distinct_destinations(BlockMapping mapping) {
  std::unordered_set<std::int64_t> destinations;
  destinations.reserve(static_cast<std::size_t>(mapping.num_rows));
  for (std::int64_t pair = 0; pair < mapping.num_rows; ++pair) {
    PAGED_KV_CHECK(destinations.insert(mapping(pair, 1)).second,
                   "block_mapping: expected distinct destinations, got block ", mapping(pair, 1),
                   " twice");
  }
  return destinations;
}

}  // namespace

BlockShape::BlockShape(std::span<const std::int64_t> sizes, std::span<const std::int64_t> strides,
                       std::int64_t element_size)
    : run_bytes_(element_size) {
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] != 1) {
      outer_.push_back({sizes[i], strides[i] * element_size});
    }
  }
  // The order of elements does not matter to a copy, so dimensions go by stride: an hnd view of a
  // dense block then merges into one run, as an nhd one does.
  std::sort(outer_.begin(), outer_.end(),
            [](const Dim& a, const Dim& b) { return a.stride_bytes > b.stride_bytes; });
  while (!outer_.empty() && outer_.back().stride_bytes == run_bytes_) {
    run_bytes_ *= outer_.back().size;
    outer_.pop_back();
  }
  for (const Dim& dim : outer_) {
    num_runs_ *= dim.size;
  }
}

void BlockShape::copy(const std::byte* src, std::byte* dst) const {
  if (num_bytes() == 0) {
    return;  // memcpy may not be given the null pointers of an empty tensor
  }
  for (std::int64_t run = 0; run < num_runs_; ++run) {
    std::int64_t offset = 0;
    std::int64_t rest = run;
    for (std::size_t i = outer_.size(); i-- > 0;) {
      offset += rest % outer_[i].size * outer_[i].stride_bytes;
      rest /= outer_[i].size;
    }
    std::memcpy(dst + offset, src + offset, static_cast<std::size_t>(run_bytes_));
  }
}

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
  (void)distinct_destinations(mapping);
  for (std::int64_t pair = 0; pair < mapping.num_rows; ++pair) {
    check_block_id(mapping(pair, 0), src.num_blocks, pair, "source");
    check_block_id(mapping(pair, 1), dst.num_blocks, pair, "destination");
  }
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
