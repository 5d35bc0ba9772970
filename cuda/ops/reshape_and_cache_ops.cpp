// SPDX-License-Identifier: Apache-2.0
#include "cuda/ops/current_stream.h"
#include "ops/boxed.h"
#include "ops/cache_panels_checks.h"
#include "ops/registration.h"
#include "ops/reshape_and_cache_checks.h"
#include "paged_kv/cuda/reshape_and_cache.h"

#include <string>

namespace paged_kv::cuda {
namespace {

void reshape_and_cache_op(const Tensor& key, const Tensor& value, const Tensor& key_cache,
                          const Tensor& value_cache, const Tensor& slot_mapping,
                          const std::string& kv_cache_dtype, const Tensor& k_scale,
                          const Tensor& v_scale) {
  const ReshapeAndCacheParams params = checked_reshape_and_cache(
      kOpDevice, parse_kv_cache_dtype(kv_cache_dtype, OpDevice::kCuda),
      {key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale});
  const CurrentStream current(key_cache);
  reshape_and_cache(params, current.stream());
}

void reshape_and_cache_flash_op(const Tensor& key, const Tensor& value, const Tensor& key_cache,
                                const Tensor& value_cache, const Tensor& slot_mapping,
                                const std::string& kv_cache_dtype, const Tensor& k_scale,
                                const Tensor& v_scale) {
  refuse_panels(key_cache, "key_cache");
  refuse_panels(value_cache, "value_cache");
  const ReshapeAndCacheFlashParams params = checked_reshape_and_cache_flash(
      kOpDevice, parse_kv_cache_dtype(kv_cache_dtype, OpDevice::kCuda),
      {key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale});
  const CurrentStream current(key_cache);
  reshape_and_cache_flash(params, current.stream());
}

}  // namespace

PAGED_KV_CUDA_OPS(m) {
  m.impl("reshape_and_cache", PAGED_KV_BOX(&reshape_and_cache_op));
  m.impl("reshape_and_cache_flash", PAGED_KV_BOX(&reshape_and_cache_flash_op));
}

}  // namespace paged_kv::cuda
