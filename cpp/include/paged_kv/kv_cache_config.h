// SPDX-License-Identifier: Apache-2.0
//
// How the layers of a model share one pool of blocks.
//
// Source: vLLM 0.32 v1/kv_cache_interface.py::KVCacheGroupSpec, KVCacheTensor, KVCacheConfig.
#pragma once

#include "paged_kv/kv_cache_spec.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace paged_kv {

// Layers that share one block table.
struct KVCacheGroupSpec {
  std::vector<std::string> layer_names;
  KVCacheSpecPtr kv_cache_spec;
  // Holds layers of an EAGLE or MTP draft model: a prefix hit drops its last block, because the
  // draft wrote that block looking at tokens that come after the prefix.
  bool is_eagle_group = false;
};

// Where layers of one shape lie in the memory of the cache: the block `b` of layers[l] begins
// at byte offset + l * layer_stride + b * block_stride. Tensors may overlap: a block id belongs to
// one group at a time.
struct KVCacheTensor {
  std::int64_t size = 0;  // bytes of the whole allocation
  std::vector<std::string> layers;
  std::int64_t layer_stride = 0;
  std::int64_t block_stride = 0;
  std::int64_t offset = 0;
};

struct KVCacheConfig {
  std::int64_t num_blocks = 0;  // the null block included
  std::vector<KVCacheTensor> kv_cache_tensors;
  std::vector<KVCacheGroupSpec> kv_cache_groups;
  // Which blocks of sliding-window groups are worth caching. nullopt: those before every boundary
  // at which a hit can end; 0: only those before a boundary that a repeated prompt reaches; n: also
  // those before every n-th token. A multiple of the scheduler's block size.
  std::optional<std::int64_t> prefix_cache_retention_interval;
};

}  // namespace paged_kv
