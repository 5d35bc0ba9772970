// SPDX-License-Identifier: Apache-2.0
//
// Which layers of a model share a block table.
//
// All groups take blocks from one pool, so that a block of any group must have the same bytes.
// Hence layers with small pages get larger blocks or padding, and groups get equally many layers.
//
// Source: vLLM 0.32 v1/core/kv_cache_utils.py::get_kv_cache_groups and the functions it calls.
#pragma once

#include "paged_kv/kv_cache_config.h"
#include "paged_kv/uniform_type_spec.h"

#include <vector>

namespace paged_kv {

// One spec for all, or null if they cannot share all bookkeeping. Layers with full attention may
// differ in whether they have a window or chunk; two different ones throw std::invalid_argument.
[[nodiscard]] KVCacheSpecPtr merge_kv_cache_specs(const std::vector<KVCacheSpecPtr>& specs);

// The same layers with pages of equal size: a page that divides the largest gets a larger block,
// another is padded.
[[nodiscard]] LayerSpecs unify_kv_cache_spec_page_size(const LayerSpecs& layers);

// Sliding-window and chunked layers beside full-attention layers as full-attention layers, which
// keep every token. Throws std::invalid_argument if even so the layers are not of one type.
[[nodiscard]] LayerSpecs unify_hybrid_kv_cache_specs(const LayerSpecs& layers);

// The groups. None without layers. `disable_hybrid_kv_cache_manager`: one group, whose layers all
// keep every token.
[[nodiscard]] std::vector<KVCacheGroupSpec> get_kv_cache_groups(
    LayerSpecs layers, bool disable_hybrid_kv_cache_manager = false);

}  // namespace paged_kv
