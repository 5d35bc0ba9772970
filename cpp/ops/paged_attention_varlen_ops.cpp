// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_checks.h"
#include "ops/boxed.h"
#include "ops/cpu/isa/select.h"
#include "ops/cpu/paged_attention.h"
#include "ops/registration.h"
#include "ops/tensor_checks.h"
#include "ops/torch_thread_runner.h"

#include <cmath>
#include <optional>
#include <string>

namespace paged_kv {
namespace {

void check_lse(const std::optional<Tensor>& lse, NamedSizes& sizes) {
  if (!lse) return;
  check(*lse, "lse", sizes).shape({"num_heads", "num_tokens"}).dtype(ScalarType::Float).writable();
}

// The CPU kernel balances its threads while it runs and needs no scratch from outside.
void check_plan(const std::optional<Tensor>& plan, const std::optional<Tensor>& workspace) {
  NamedSizes sizes;
  if (plan) check(*plan, "plan", sizes).shape({"plan_size"}).dtype(ScalarType::Int).contiguous();
  if (workspace) check(*workspace, "workspace", sizes).contiguous().writable();
}

void check_scalars(double scale, std::int64_t sliding_window, double softcap,
                   std::int64_t split_tokens) {
  check_attention_scale(scale);
  PAGED_KV_CHECK(sliding_window >= 0, "sliding_window: expected >= 0, got ", sliding_window);
  const auto softcap32 = static_cast<float>(softcap);  // the kernel divides by it
  PAGED_KV_CHECK(softcap == 0 || (softcap > 0 && std::isnormal(softcap32)),
                 "softcap: expected 0 or a positive normal float32, got ", softcap);
  PAGED_KV_CHECK(split_tokens >= 0, "split_tokens: expected >= 0, got ", split_tokens);
}

void paged_attention_varlen(const Tensor& out, const Tensor& query, const Tensor& key_cache,
                            const Tensor& value_cache, const Tensor& query_start_loc,
                            const Tensor& seq_lens, const Tensor& block_tables, double scale,
                            bool causal, std::int64_t sliding_window, double softcap,
                            const std::optional<Tensor>& alibi_slopes,
                            const std::optional<Tensor>& sinks, const std::optional<Tensor>& lse,
                            const std::string& kv_cache_dtype, const std::optional<Tensor>& k_scale,
                            const std::optional<Tensor>& v_scale, std::int64_t max_query_len,
                            std::int64_t max_seq_len, const std::optional<Tensor>& plan,
                            const std::optional<Tensor>& workspace, std::int64_t split_tokens) {
  NamedSizes sizes;
  const KvCacheDtype cache_dtype = parse_kv_cache_dtype(kv_cache_dtype, OpDevice::kCpu);
  check_query(out, query, sizes);
  check_cache(key_cache, value_cache, cache_dtype, query.scalar_type(), sizes);
  const cpu::AttentionBatch batch =
      make_batch(&query_start_loc, seq_lens, block_tables, max_query_len, max_seq_len, sizes);
  const PerHead slopes = check_per_head(alibi_slopes, "alibi_slopes", sizes);
  const PerHead sink_logits = check_per_head(sinks, "sinks", sizes);
  CacheScales scales;
  if (k_scale) scales.key = check_scale(*k_scale, "k_scale", sizes);
  if (v_scale) scales.value = check_scale(*v_scale, "v_scale", sizes);
  check_lse(lse, sizes);
  check_plan(plan, workspace);
  check_scalars(scale, sliding_window, softcap, split_tokens);
  const cpu::AttentionMask mask{.causal = causal, .sliding_window = sliding_window};
  cpu::check_batch(batch, mask);

  cpu::PagedAttentionParams params{};
  params.kernels = &cpu::attention_kernels();
  params.batch = batch;
  params.mask = mask;
  set_tensors(params, out, query, key_cache, value_cache, cache_dtype, scales, sizes);
  if (lse) {
    params.lse = lse->mutable_data_ptr<float>();
    params.lse_head_stride = lse->stride(0);
    params.lse_token_stride = lse->stride(1);
  }
  params.scale = static_cast<float>(scale);
  params.softcap = static_cast<float>(softcap);
  params.alibi_slopes = slopes.data;
  params.alibi_stride = slopes.stride;
  params.sinks = sink_logits.data;
  params.sinks_stride = sink_logits.stride;
  cpu::paged_attention(params, kTorchRunner);
}

}  // namespace

PAGED_KV_CPU_OPS(m) { m.impl("paged_attention_varlen", PAGED_KV_BOX(&paged_attention_varlen)); }

}  // namespace paged_kv
