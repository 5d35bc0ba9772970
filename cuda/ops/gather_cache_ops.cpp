// SPDX-License-Identifier: Apache-2.0
#include "cuda/ops/current_stream.h"
#include "ops/boxed.h"
#include "ops/cache_panels_checks.h"
#include "ops/gather_cache_checks.h"
#include "ops/registration.h"
#include "paged_kv/cuda/gather_cache.h"

#include <optional>
#include <string>

namespace paged_kv::cuda {
namespace {

void gather_cache_op(const Tensor& cache, const Tensor& out, const Tensor& block_tables,
                     const Tensor& cu_seq_lens, const std::optional<Tensor>& seq_starts,
                     const std::string& kv_cache_dtype, const std::optional<Tensor>& scale) {
  refuse_panels(cache, "cache");
  const GatherCacheParams params =
      checked_gather_cache(kOpDevice, parse_kv_cache_dtype(kv_cache_dtype, OpDevice::kCuda), cache,
                           out, block_tables, cu_seq_lens, seq_starts, scale);
  const CurrentStream current(out);
  gather_cache(params, current.stream());
}

}  // namespace

PAGED_KV_CUDA_OPS(m) { m.impl("gather_cache", PAGED_KV_BOX(&gather_cache_op)); }

}  // namespace paged_kv::cuda
