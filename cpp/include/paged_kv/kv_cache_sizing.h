// SPDX-License-Identifier: Apache-2.0
//
// How many blocks fit into memory, and how long a request they can hold.
//
// Source: vLLM 0.32 v1/core/kv_cache_utils.py::get_kv_cache_configs and the functions it calls.
#pragma once

#include "paged_kv/kv_cache_config.h"
#include "paged_kv/uniform_type_spec.h"

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace paged_kv {

struct SizingOptions {
  RequestLimits limits;
  // Instead of what fits into memory.
  std::optional<std::int64_t> num_blocks_override;
  // See KVCacheConfig.
  std::optional<std::int64_t> prefix_cache_retention_interval;
  // Tokens after a chunk of a prompt that a draft model looks at: windows keep one less in
  // addition.
  std::int64_t num_prefill_lookahead_tokens = 0;
  bool disable_hybrid_kv_cache_manager = false;
};

// Bytes of a block id in all layers of the group that needs most.
[[nodiscard]] std::int64_t get_bytes_per_block(std::span<const KVCacheGroupSpec> groups);

// Bytes that one request of max_model_len tokens needs, at most.
[[nodiscard]] std::int64_t max_memory_usage_bytes(std::span<const KVCacheGroupSpec> groups,
                                                  const RequestLimits& limits);

// The longest request that fits into `available_memory` bytes, at most limits.max_model_len tokens;
// 0 if not even one token does. O(layers * log(max_model_len)).
[[nodiscard]] std::int64_t estimate_max_model_len(std::span<const KVCacheGroupSpec> groups,
                                                  const RequestLimits& limits,
                                                  std::int64_t available_memory);

// Requests of max_model_len tokens that the blocks hold at a time.
[[nodiscard]] double get_max_concurrency_for_kv_cache_config(const KVCacheConfig& config,
                                                             const RequestLimits& limits);

// As many blocks as fit into `available_memory` bytes, each layer's blocks side by side. One block
// without groups: a pool needs its null block.
[[nodiscard]] KVCacheConfig get_kv_cache_config_from_groups(std::vector<KVCacheGroupSpec> groups,
                                                            std::int64_t available_memory,
                                                            const SizingOptions& options);

// One config for each worker: the same groups, as far as the worker has their layers, and as many
// blocks as the smallest worker can have. Throws std::invalid_argument if a request of
// max_model_len tokens does not fit beside the null block, or if workers disagree about a layer.
[[nodiscard]] std::vector<KVCacheConfig> get_kv_cache_configs(
    std::span<const LayerSpecs> workers, std::span<const std::int64_t> available_memory,
    const SizingOptions& options);

// What a scheduler needs of the workers' configs: one spec a group, also where layers differ.
[[nodiscard]] KVCacheConfig generate_scheduler_kv_cache_config(
    std::span<const KVCacheConfig> configs);

}  // namespace paged_kv
