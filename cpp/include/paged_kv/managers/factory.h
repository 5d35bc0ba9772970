// SPDX-License-Identifier: Apache-2.0
//
// Which manager keeps the blocks of which spec: the one place that a new kind of attention enters.
//
// Source: vLLM 0.32 v1/core/single_type_kv_cache_manager.py::get_manager_for_kv_cache_spec.
#pragma once

#include "paged_kv/managers/single_type.h"

#include <memory>

namespace paged_kv {

[[nodiscard]] std::unique_ptr<SingleTypeKVCacheManager> get_manager_for_kv_cache_spec(
    const KVCacheSpecPtr& kv_cache_spec, BlockPool& block_pool, GroupId kv_cache_group_id,
    const RequestLimits& limits);

}  // namespace paged_kv
