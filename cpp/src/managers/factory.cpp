// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/managers/factory.h"

#include "paged_kv/check.h"
#include "paged_kv/managers/chunked_local.h"
#include "paged_kv/managers/full_attention.h"
#include "paged_kv/managers/sliding_window.h"
#include "paged_kv/uniform_type_spec.h"

namespace paged_kv {
namespace {

template <class Manager, class Spec>
std::unique_ptr<SingleTypeKVCacheManager> make(const KVCacheSpecPtr& spec, BlockPool& block_pool,
                                               GroupId kv_cache_group_id,
                                               const RequestLimits& limits) {
  return std::make_unique<Manager>(std::static_pointer_cast<const Spec>(spec), block_pool,
                                   kv_cache_group_id, limits);
}

}  // namespace

std::unique_ptr<SingleTypeKVCacheManager> get_manager_for_kv_cache_spec(
    const KVCacheSpecPtr& kv_cache_spec, BlockPool& block_pool, GroupId kv_cache_group_id,
    const RequestLimits& limits) {
  // Layers of one type differ in the bytes of a block only, which no manager looks at.
  if (const auto* uniform = dynamic_cast<const UniformTypeKVCacheSpecs*>(kv_cache_spec.get())) {
    return get_manager_for_kv_cache_spec(uniform->first_spec(), block_pool, kv_cache_group_id,
                                         limits);
  }
  switch (kv_cache_spec->kind()) {
    case KVCacheSpecKind::kFullAttention:
      return make<FullAttentionManager, FullAttentionSpec>(kv_cache_spec, block_pool,
                                                           kv_cache_group_id, limits);
    case KVCacheSpecKind::kSlidingWindow:
      return make<SlidingWindowManager, SlidingWindowSpec>(kv_cache_spec, block_pool,
                                                           kv_cache_group_id, limits);
    case KVCacheSpecKind::kChunkedLocalAttention:
      return make<ChunkedLocalAttentionManager, ChunkedLocalAttentionSpec>(
          kv_cache_spec, block_pool, kv_cache_group_id, limits);
  }
  PAGED_KV_CHECK(false, "no manager for specs of kind ", to_string(kv_cache_spec->kind()));
}

}  // namespace paged_kv
