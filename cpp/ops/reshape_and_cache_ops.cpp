// SPDX-License-Identifier: Apache-2.0
#include "ops/boxed.h"
#include "ops/cpu/reshape_and_cache.h"
#include "ops/registration.h"
#include "ops/reshape_and_cache_checks.h"
#include "ops/torch_thread_runner.h"

#include <string>

namespace paged_kv {
namespace {

void reshape_and_cache(const Tensor& key, const Tensor& value, const Tensor& key_cache,
                       const Tensor& value_cache, const Tensor& slot_mapping,
                       const std::string& kv_cache_dtype, const Tensor& k_scale,
                       const Tensor& v_scale) {
  cpu::reshape_and_cache(checked_reshape_and_cache(
                             OpDevice::kCpu, parse_kv_cache_dtype(kv_cache_dtype, OpDevice::kCpu),
                             {key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale}),
                         kTorchRunner);
}

void reshape_and_cache_flash(const Tensor& key, const Tensor& value, const Tensor& key_cache,
                             const Tensor& value_cache, const Tensor& slot_mapping,
                             const std::string& kv_cache_dtype, const Tensor& k_scale,
                             const Tensor& v_scale) {
  const KvCacheDtype cache_dtype = parse_kv_cache_dtype(kv_cache_dtype, OpDevice::kCpu);
  const WriterArguments args{key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale};
  if (have_panels(key_cache, value_cache)) {
    return cpu::reshape_and_cache_panels(checked_reshape_and_cache_panels(cache_dtype, args),
                                         kTorchRunner);
  }
  cpu::reshape_and_cache_flash(checked_reshape_and_cache_flash(OpDevice::kCpu, cache_dtype, args),
                               kTorchRunner);
}

}  // namespace

PAGED_KV_CPU_OPS(m) {
  m.impl("reshape_and_cache", PAGED_KV_BOX(&reshape_and_cache));
  m.impl("reshape_and_cache_flash", PAGED_KV_BOX(&reshape_and_cache_flash));
}

}  // namespace paged_kv
