// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/isa/select_cache.h"

#include "ops/cpu/isa/select.h"

#include <string_view>

namespace paged_kv::cpu {
namespace {

constexpr std::string_view kScalar = "scalar";

const CacheKernels& kernels_beside(const AttentionKernels& attention) {
#if defined(__x86_64__)
  if (attention.name != kScalar) return kAvx2CacheKernels;
#endif
  static_cast<void>(attention);
  return kScalarCacheKernels;
}

}  // namespace

std::vector<const CacheKernels*> available_cache_kernels() {
  std::vector<const CacheKernels*> result;
  for (const AttentionKernels* attention : available_attention_kernels()) {
    const CacheKernels* kernels = &kernels_beside(*attention);
    if (result.empty() || result.back() != kernels) result.push_back(kernels);
  }
  return result;
}

const CacheKernels& cache_kernels() { return kernels_beside(attention_kernels()); }

}  // namespace paged_kv::cpu
