// SPDX-License-Identifier: Apache-2.0
#include "bindings.h"
#include "casters.h"
#include "paged_kv/kv_cache_groups.h"
#include "paged_kv/kv_cache_sizing.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace paged_kv::bindings {
namespace {

using SpecDict = py::typing::Dict<py::str, KVCacheSpec>;

LayerSpecs to_layers(const SpecDict& specs) {
  LayerSpecs layers;
  for (const auto& [name, spec] : specs) {
    auto pointer = spec.cast<std::shared_ptr<KVCacheSpec>>();
    if (pointer == nullptr) throw py::type_error("a layer's spec must not be None");
    layers.emplace_back(name.cast<std::string>(), std::move(pointer));
  }
  return layers;
}

SpecDict to_dict(const LayerSpecs& layers) {
  SpecDict specs;
  for (const auto& [name, spec] : layers) {
    specs[py::str(name)] = py::cast(std::const_pointer_cast<KVCacheSpec>(spec));
  }
  return specs;
}

void bind_uniform_type_spec(py::module_& m) {
  py::class_<UniformTypeKVCacheSpecs, KVCacheSpec, std::shared_ptr<UniformTypeKVCacheSpecs>>(
      m, "UniformTypeKVCacheSpecs",
      R"(Layers of one kind that need the same slots, but differ in the bytes of a token.

Source:
    vLLM 0.32 v1/kv_cache_interface.py::UniformTypeKVCacheSpecs.
)")
      .def_property_readonly(
          "kv_cache_specs",
          [](const UniformTypeKVCacheSpecs& self) { return to_dict(self.layers()); },
          "The spec of each layer.");
}

void bind_groups(py::module_& m) {
  m.def(
      "unify_kv_cache_spec_page_size",
      [](const SpecDict& kv_cache_spec) {
        return to_dict(unify_kv_cache_spec_page_size(to_layers(kv_cache_spec)));
      },
      py::arg("kv_cache_spec"),
      R"(The same layers with blocks of equal bytes.

A page that divides the largest one gets a larger block, another is padded.

Args:
    kv_cache_spec: The spec of each layer.

Source:
    vLLM 0.32 v1/core/kv_cache_utils.py::unify_kv_cache_spec_page_size.
)");
  m.def(
      "get_kv_cache_groups",
      [](const SpecDict& kv_cache_spec, bool disable_hybrid_kv_cache_manager) {
        return get_kv_cache_groups(to_layers(kv_cache_spec), disable_hybrid_kv_cache_manager);
      },
      py::arg("kv_cache_spec"), py::kw_only(),
      py::arg("disable_hybrid_kv_cache_manager").noconvert() = false,
      R"(Which layers of a model share a block table.

Layers with specs that can be merged are one group; layers of different kinds are split into groups of
equally many layers, whose blocks have equal bytes, as all take blocks from one pool.

Args:
    kv_cache_spec: The spec of each layer, in order.
    disable_hybrid_kv_cache_manager: One group, whose layers all keep every token.

Returns:
    The groups; none without layers.

Raises:
    ValueError: layers that cannot be grouped.

Source:
    vLLM 0.32 v1/core/kv_cache_utils.py::get_kv_cache_groups.

Example:
    >>> shape = dict(block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16")
    >>> full, window = FullAttentionSpec(**shape), SlidingWindowSpec(sliding_window=1024, **shape)
    >>> layers = {f"layer.{i}": full if i % 3 == 2 else window for i in range(6)}
    >>> [group.layer_names for group in get_kv_cache_groups(layers)]
    [['layer.0', 'layer.3'], ['layer.1', 'layer.4'], ['layer.2', 'layer.5']]
)");
}

void bind_lengths(py::module_& m) {
  m.def(
      "estimate_max_model_len",
      [](const std::vector<KVCacheGroupSpec>& groups, std::int64_t max_model_len,
         std::int64_t max_in_flight_tokens, std::int64_t available_memory) {
        return estimate_max_model_len(groups, {max_model_len, max_in_flight_tokens},
                                      available_memory);
      },
      py::arg("kv_cache_groups"), py::kw_only(), py::arg("max_model_len").noconvert(),
      py::arg("max_in_flight_tokens").noconvert(), py::arg("available_memory").noconvert(),
      R"(The longest request that fits into memory, in tokens.

Args:
    kv_cache_groups: The groups of the model.
    max_model_len: No longer than this.
    max_in_flight_tokens: Most tokens that are scheduled and not processed yet.
    available_memory: Bytes.

Returns:
    At most `max_model_len`; 0 if not even one token fits.

Source:
    vLLM 0.32 v1/core/kv_cache_utils.py::_estimate_max_model_len_from_groups.
)");
  m.def(
      "get_max_concurrency_for_kv_cache_config",
      [](const KVCacheConfig& config, std::int64_t max_model_len,
         std::int64_t max_in_flight_tokens) {
        return get_max_concurrency_for_kv_cache_config(config,
                                                       {max_model_len, max_in_flight_tokens});
      },
      py::arg("kv_cache_config"), py::kw_only(), py::arg("max_model_len").noconvert(),
      py::arg("max_in_flight_tokens").noconvert(),
      R"(Requests of `max_model_len` tokens that the blocks hold at a time.

Source:
    vLLM 0.32 v1/core/kv_cache_utils.py::get_max_concurrency_for_kv_cache_config.
)");
}

void bind_configs(py::module_& m) {
  m.def(
      "get_kv_cache_configs",
      [](const std::vector<SpecDict>& kv_cache_specs,
         const std::vector<std::int64_t>& available_memory, std::int64_t max_model_len,
         std::int64_t max_in_flight_tokens, std::optional<std::int64_t> num_gpu_blocks_override,
         std::optional<std::int64_t> prefix_cache_retention_interval,
         std::int64_t num_prefill_lookahead_tokens, bool disable_hybrid_kv_cache_manager) {
        std::vector<LayerSpecs> workers;
        for (const SpecDict& specs : kv_cache_specs) workers.push_back(to_layers(specs));
        return get_kv_cache_configs(
            workers, available_memory,
            {.limits = {max_model_len, max_in_flight_tokens},
             .num_blocks_override = num_gpu_blocks_override,
             .prefix_cache_retention_interval = prefix_cache_retention_interval,
             .num_prefill_lookahead_tokens = num_prefill_lookahead_tokens,
             .disable_hybrid_kv_cache_manager = disable_hybrid_kv_cache_manager});
      },
      py::arg("kv_cache_specs"), py::arg("available_memory"), py::kw_only(),
      py::arg("max_model_len").noconvert(), py::arg("max_in_flight_tokens").noconvert(),
      py::arg("num_gpu_blocks_override").noconvert() = py::none(),
      py::arg("prefix_cache_retention_interval").noconvert() = py::none(),
      py::arg("num_prefill_lookahead_tokens").noconvert() = 0,
      py::arg("disable_hybrid_kv_cache_manager").noconvert() = false,
      R"(How many blocks each worker has, and where its layers lie in memory.

All workers get the same groups, as far as they have their layers, and as many blocks as the smallest
worker can have.

Args:
    kv_cache_specs: For each worker, the spec of each of its layers.
    available_memory: Bytes of each worker.
    max_model_len: Longest request, in tokens.
    max_in_flight_tokens: Most tokens that are scheduled and not processed yet.
    num_gpu_blocks_override: This many blocks instead of what fits.
    prefix_cache_retention_interval: See `KVCacheConfig`.
    num_prefill_lookahead_tokens: Tokens after a chunk of a prompt that a draft model looks at.
    disable_hybrid_kv_cache_manager: See `get_kv_cache_groups`.

Raises:
    ValueError: a request of `max_model_len` tokens does not fit beside the null block, or workers
        disagree about a layer.

Source:
    vLLM 0.32 v1/core/kv_cache_utils.py::get_kv_cache_configs.
)");
  m.def(
      "generate_scheduler_kv_cache_config",
      [](const std::vector<KVCacheConfig>& configs) {
        return generate_scheduler_kv_cache_config(configs);
      },
      py::arg("kv_cache_configs"),
      R"(What a scheduler needs of the workers' configs: one spec a group.

Source:
    vLLM 0.32 v1/core/kv_cache_utils.py::generate_scheduler_kv_cache_config.
)");
}

}  // namespace

void bind_sizing(py::module_& m) {
  bind_uniform_type_spec(m);
  bind_groups(m);
  bind_lengths(m);
  bind_configs(m);
}

}  // namespace paged_kv::bindings
