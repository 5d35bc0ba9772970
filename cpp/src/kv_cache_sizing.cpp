// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/kv_cache_sizing.h"

#include "paged_kv/check.h"
#include "paged_kv/kv_cache_groups.h"

#include <algorithm>
#include <string>
#include <utility>

namespace paged_kv {
namespace {

std::int64_t bytes_per_block_of(const KVCacheGroupSpec& group) {
  std::int64_t bytes = 0;
  for (const std::string& name : group.layer_names) {
    bytes += get_layer_spec(group.kv_cache_spec, name)->page_size_bytes();
  }
  return bytes;
}

// The layers of all workers. Workers that share a layer must agree about it.
LayerSpecs merge_workers(std::span<const LayerSpecs> workers) {
  LayerSpecs merged;
  for (const LayerSpecs& layers : workers) {
    for (const auto& [name, spec] : layers) {
      const auto same =
          std::ranges::find_if(merged, [&name = name](const auto& l) { return l.first == name; });
      if (same == merged.end()) {
        merged.emplace_back(name, spec);
        continue;
      }
      PAGED_KV_CHECK(same->second->equals(*spec), "workers differ in the spec of layer ", name);
    }
  }
  return merged;
}

void retain_tokens_for_drafts(LayerSpecs& layers, std::int64_t num_prefill_lookahead_tokens) {
  const std::int64_t num_retained = std::max(num_prefill_lookahead_tokens - 1, std::int64_t{0});
  for (auto& [name, spec] : layers) {
    const auto* window = dynamic_cast<const SlidingWindowSpec*>(spec.get());
    if (window == nullptr) continue;
    spec = std::make_shared<SlidingWindowSpec>(window->format(), window->sliding_window(),
                                               num_retained);
  }
}

bool has_layer(const LayerSpecs& layers, const std::string& layer_name) {
  return std::ranges::any_of(layers, [&](const auto& layer) { return layer.first == layer_name; });
}

// What a worker has of a group; possibly no layer.
KVCacheGroupSpec project(const KVCacheGroupSpec& group, const LayerSpecs& worker) {
  KVCacheGroupSpec projected{{}, group.kv_cache_spec};
  for (const std::string& name : group.layer_names) {
    if (has_layer(worker, name)) projected.layer_names.push_back(name);
  }
  projected.is_eagle_group = group.is_eagle_group && !projected.layer_names.empty();
  const auto* uniform = dynamic_cast<const UniformTypeKVCacheSpecs*>(group.kv_cache_spec.get());
  if (uniform == nullptr || projected.layer_names.empty()) return projected;
  LayerSpecs layers;
  for (const std::string& name : projected.layer_names) {
    layers.emplace_back(name, get_layer_spec(group.kv_cache_spec, name));
  }
  projected.kv_cache_spec = UniformTypeKVCacheSpecs::from_specs(layers);
  return projected;
}

void check_enough_memory(std::span<const KVCacheGroupSpec> groups, std::int64_t available_memory,
                         const RequestLimits& limits) {
  if (groups.empty()) return;
  // The null block holds no tokens.
  const std::int64_t usable_memory = available_memory - get_bytes_per_block(groups);
  PAGED_KV_CHECK(usable_memory > 0, "available_memory must hold more than one block of ",
                 get_bytes_per_block(groups), " bytes, got ", available_memory);
  const std::int64_t needed_memory = max_memory_usage_bytes(groups, limits);
  PAGED_KV_CHECK(needed_memory <= usable_memory, "a request of max_model_len (",
                 limits.max_model_len, ") tokens needs ", needed_memory, " bytes, but ",
                 usable_memory, " are available: at most ",
                 estimate_max_model_len(groups, limits, usable_memory), " tokens fit");
}

// Layers with equal specs, in order of their first layer.
std::vector<std::pair<KVCacheSpecPtr, std::vector<std::string>>> layers_by_spec(
    const KVCacheGroupSpec& group) {
  std::vector<std::pair<KVCacheSpecPtr, std::vector<std::string>>> result;
  for (const std::string& name : group.layer_names) {
    const KVCacheSpecPtr spec = get_layer_spec(group.kv_cache_spec, name);
    auto same =
        std::ranges::find_if(result, [&](const auto& other) { return other.first->equals(*spec); });
    if (same == result.end()) same = result.insert(same, {spec, {}});
    same->second.push_back(name);
  }
  return result;
}

}  // namespace

std::int64_t get_bytes_per_block(std::span<const KVCacheGroupSpec> groups) {
  std::int64_t bytes = 0;
  for (const KVCacheGroupSpec& group : groups) bytes = std::max(bytes, bytes_per_block_of(group));
  return bytes;
}

std::int64_t max_memory_usage_bytes(std::span<const KVCacheGroupSpec> groups,
                                    const RequestLimits& limits) {
  std::int64_t num_blocks = 0;
  for (const KVCacheGroupSpec& group : groups) {
    num_blocks += group.kv_cache_spec->max_num_blocks_per_request(limits);
  }
  return num_blocks * get_bytes_per_block(groups);
}

std::int64_t estimate_max_model_len(std::span<const KVCacheGroupSpec> groups,
                                    const RequestLimits& limits, std::int64_t available_memory) {
  const auto fits = [&](std::int64_t max_model_len) {
    return max_memory_usage_bytes(groups, {max_model_len, limits.max_in_flight_tokens}) <=
           available_memory;
  };
  std::int64_t longest = 0;  // that fits
  std::int64_t shortest_too_long = limits.max_model_len + 1;
  while (shortest_too_long - longest > 1) {
    const std::int64_t middle = longest + (shortest_too_long - longest) / 2;
    (fits(middle) ? longest : shortest_too_long) = middle;
  }
  return longest;
}

double get_max_concurrency_for_kv_cache_config(const KVCacheConfig& config,
                                               const RequestLimits& limits) {
  PAGED_KV_CHECK(!config.kv_cache_groups.empty() && limits.max_model_len > 0,
                 "concurrency needs a cache group and a positive max_model_len");
  std::int64_t num_blocks_per_request = 0;
  for (const KVCacheGroupSpec& group : config.kv_cache_groups) {
    num_blocks_per_request += group.kv_cache_spec->max_num_blocks_per_request(limits);
  }
  return static_cast<double>(config.num_blocks) / static_cast<double>(num_blocks_per_request);
}

KVCacheConfig get_kv_cache_config_from_groups(std::vector<KVCacheGroupSpec> groups,
                                              std::int64_t available_memory,
                                              const SizingOptions& options) {
  KVCacheConfig config;
  config.prefix_cache_retention_interval = options.prefix_cache_retention_interval;
  config.kv_cache_groups = std::move(groups);
  if (config.kv_cache_groups.empty()) {
    config.num_blocks = 1;
    return config;
  }
  const std::int64_t bytes_per_block = get_bytes_per_block(config.kv_cache_groups);
  PAGED_KV_CHECK(bytes_per_block > 0, "the groups have no layers");
  config.num_blocks = options.num_blocks_override.value_or(available_memory / bytes_per_block);
  for (const KVCacheGroupSpec& group : config.kv_cache_groups) {
    std::int64_t offset = 0;
    for (auto& [spec, layer_names] : layers_by_spec(group)) {
      const std::int64_t block_stride = spec->page_size_bytes();
      const std::int64_t layer_stride = block_stride * config.num_blocks;
      const std::int64_t num_layers = std::ssize(layer_names);
      config.kv_cache_tensors.push_back({.size = bytes_per_block * config.num_blocks,
                                         .layers = std::move(layer_names),
                                         .layer_stride = layer_stride,
                                         .block_stride = block_stride,
                                         .offset = offset});
      offset += num_layers * layer_stride;
    }
  }
  return config;
}

std::vector<KVCacheConfig> get_kv_cache_configs(std::span<const LayerSpecs> workers,
                                                std::span<const std::int64_t> available_memory,
                                                const SizingOptions& options) {
  PAGED_KV_CHECK(workers.size() == available_memory.size(), "there are ", workers.size(),
                 " workers, but available_memory of ", available_memory.size());
  LayerSpecs layers = merge_workers(workers);
  retain_tokens_for_drafts(layers, options.num_prefill_lookahead_tokens);
  const std::vector<KVCacheGroupSpec> groups =
      get_kv_cache_groups(std::move(layers), options.disable_hybrid_kv_cache_manager);

  std::vector<KVCacheConfig> configs;
  std::optional<std::int64_t> min_num_blocks;
  for (std::size_t i = 0; i < workers.size(); ++i) {
    std::vector<KVCacheGroupSpec> projected;
    for (const KVCacheGroupSpec& group : groups) projected.push_back(project(group, workers[i]));
    std::int64_t memory = available_memory[i];
    if (options.num_blocks_override) {
      memory = *options.num_blocks_override * get_bytes_per_block(projected);
    }
    check_enough_memory(projected, memory, options.limits);
    configs.push_back(get_kv_cache_config_from_groups(std::move(projected), memory, options));
    min_num_blocks =
        std::min(min_num_blocks.value_or(configs.back().num_blocks), configs.back().num_blocks);
  }
  for (KVCacheConfig& config : configs) {
    if (config.num_blocks == *min_num_blocks) continue;
    const std::int64_t memory = *min_num_blocks * get_bytes_per_block(config.kv_cache_groups);
    config = get_kv_cache_config_from_groups(std::move(config.kv_cache_groups), memory, options);
  }
  return configs;
}

KVCacheConfig generate_scheduler_kv_cache_config(std::span<const KVCacheConfig> configs) {
  PAGED_KV_CHECK(!configs.empty(), "there are no configs");
  for (const KVCacheConfig& config : configs) {
    PAGED_KV_CHECK(config.num_blocks == configs.front().num_blocks,
                   "the workers' configs must have equally many blocks, got ",
                   configs.front().num_blocks, " and ", config.num_blocks);
  }
  KVCacheConfig config = configs.front();
  for (KVCacheGroupSpec& group : config.kv_cache_groups) {
    if (const auto* uniform =
            dynamic_cast<const UniformTypeKVCacheSpecs*>(group.kv_cache_spec.get())) {
      group.kv_cache_spec = uniform->first_spec();
    }
  }
  return config;
}

}  // namespace paged_kv
