// SPDX-License-Identifier: Apache-2.0
#include "ops/boxed.h"
#include "ops/cpu/gather_cache.h"
#include "ops/gather_cache_checks.h"
#include "ops/registration.h"
#include "ops/torch_thread_runner.h"

#include <optional>
#include <string>

namespace paged_kv {
namespace {

void gather_cache(const Tensor& cache, const Tensor& out, const Tensor& block_tables,
                  const Tensor& cu_seq_lens, const std::optional<Tensor>& seq_starts,
                  const std::string& kv_cache_dtype, const std::optional<Tensor>& scale) {
  cpu::gather_cache(
      checked_gather_cache(OpDevice::kCpu, parse_kv_cache_dtype(kv_cache_dtype, OpDevice::kCpu),
                           cache, out, block_tables, cu_seq_lens, seq_starts, scale),
      kTorchRunner);
}

}  // namespace

PAGED_KV_CPU_OPS(m) { m.impl("gather_cache", PAGED_KV_BOX(&gather_cache)); }

}  // namespace paged_kv
