// SPDX-License-Identifier: Apache-2.0
//
// paged_attention_varlen: its argument list, and the checks that do not depend on where it runs.
#pragma once

#include "ops/attention_checks.h"
#include "ops/tensor_checks.h"

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>

namespace paged_kv {

// In the op's order.
struct VarlenArguments {
  const Tensor& out;
  const Tensor& query;
  const Tensor& key_cache;
  const Tensor& value_cache;
  const Tensor& query_start_loc;
  const Tensor& seq_lens;
  const Tensor& block_tables;
  double scale;
  bool causal;
  std::int64_t sliding_window;
  double softcap;
  const std::optional<Tensor>& alibi_slopes;
  const std::optional<Tensor>& sinks;
  const std::optional<Tensor>& lse;
  const std::string& kv_cache_dtype;
  const std::optional<Tensor>& k_scale;
  const std::optional<Tensor>& v_scale;
  std::int64_t max_query_len;
  std::int64_t max_seq_len;
  const std::optional<Tensor>& plan;
  const std::optional<Tensor>& workspace;
  std::int64_t split_tokens;
};

// The op as it is registered: kRun with the arguments in a struct.
template <void (*kRun)(const VarlenArguments&)>
void paged_attention_varlen_op(const Tensor& out, const Tensor& query, const Tensor& key_cache,
                               const Tensor& value_cache, const Tensor& query_start_loc,
                               const Tensor& seq_lens, const Tensor& block_tables, double scale,
                               bool causal, std::int64_t sliding_window, double softcap,
                               const std::optional<Tensor>& alibi_slopes,
                               const std::optional<Tensor>& sinks, const std::optional<Tensor>& lse,
                               const std::string& kv_cache_dtype,
                               const std::optional<Tensor>& k_scale,
                               const std::optional<Tensor>& v_scale, std::int64_t max_query_len,
                               std::int64_t max_seq_len, const std::optional<Tensor>& plan,
                               const std::optional<Tensor>& workspace, std::int64_t split_tokens) {
  kRun({out,          query, key_cache,      value_cache,    query_start_loc, seq_lens,
        block_tables, scale, causal,         sliding_window, softcap,         alibi_slopes,
        sinks,        lse,   kv_cache_dtype, k_scale,        v_scale,         max_query_len,
        max_seq_len,  plan,  workspace,      split_tokens});
}

inline void check_lse(const std::optional<Tensor>& lse, NamedSizes& sizes) {
  if (!lse) return;
  check(*lse, "lse", sizes).shape({"num_heads", "num_tokens"}).dtype(ScalarType::Float).writable();
}

// No kernel needs either yet.
inline void check_plan(const std::optional<Tensor>& plan, const std::optional<Tensor>& workspace,
                       NamedSizes& sizes) {
  if (plan) check(*plan, "plan", sizes).shape({"plan_size"}).dtype(ScalarType::Int).contiguous();
  if (workspace) check(*workspace, "workspace", sizes).contiguous().writable();
}

inline void check_varlen_scalars(double scale, std::int64_t sliding_window, double softcap,
                                 std::int64_t split_tokens) {
  check_attention_scale(scale);
  PAGED_KV_CHECK(sliding_window >= 0, "sliding_window: expected >= 0, got ", sliding_window);
  const auto softcap32 = static_cast<float>(softcap);  // the kernel divides by it
  PAGED_KV_CHECK(softcap == 0 || (softcap > 0 && std::isnormal(softcap32)),
                 "softcap: expected 0 or a positive normal float32, got ", softcap);
  PAGED_KV_CHECK(split_tokens >= 0, "split_tokens: expected >= 0, got ", split_tokens);
}

// The metadata, per-head values and scales of one call.
struct VarlenInputs {
  cpu::AttentionBatch batch;
  PerHead slopes, sinks;
  CacheScales scales;
};

// All checks of shapes and dtypes. Binds num_tokens, num_heads, head_size, num_blocks, block_size,
// num_kv_heads and num_seqs.
[[nodiscard]] inline VarlenInputs check_varlen(const VarlenArguments& args,
                                               KvCacheDtype kv_cache_dtype, NamedSizes& sizes) {
  check_query(args.out, args.query, sizes);
  check_cache(args.key_cache, args.value_cache, kv_cache_dtype, args.query.scalar_type(), sizes);
  VarlenInputs inputs{};
  inputs.batch = make_batch(&args.query_start_loc, args.seq_lens, args.block_tables,
                            args.max_query_len, args.max_seq_len, sizes);
  inputs.slopes = check_per_head(args.alibi_slopes, "alibi_slopes", sizes);
  inputs.sinks = check_per_head(args.sinks, "sinks", sizes);
  if (args.k_scale) inputs.scales.key = check_scale(*args.k_scale, "k_scale", sizes);
  if (args.v_scale) inputs.scales.value = check_scale(*args.v_scale, "v_scale", sizes);
  check_lse(args.lse, sizes);
  check_plan(args.plan, args.workspace, sizes);
  check_varlen_scalars(args.scale, args.sliding_window, args.softcap, args.split_tokens);
  return inputs;
}

}  // namespace paged_kv
