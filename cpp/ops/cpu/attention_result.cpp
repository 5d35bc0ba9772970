// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/attention_result.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace paged_kv::cpu {
namespace {

// What a row's output is divided by once it is relative to `max`.
struct Denominator {
  float max;
  float rescale;  // exp(state.max - max)
  float sum;
};

Denominator denominator(const PagedAttentionParams& p, const SoftmaxState& state, std::int64_t head,
                        bool use_sinks) {
  if (!use_sinks) return {state.max, 1.0f, state.sum};
  const float sink = p.sinks[head * p.sinks_stride];
  // In this order NaN in state.max stays.
  const float max = sink > state.max ? sink : state.max;
  const float rescale = state.max == max ? 1.0f : std::exp(state.max - max);
  const float sink_weight = sink == max ? 1.0f : std::exp(sink - max);
  return {max, rescale, state.sum * rescale + sink_weight};
}

}  // namespace

void write_output(const PagedAttentionParams& params, const AttentionRow& row, std::int64_t head,
                  bool use_sinks, void* out) {
  if (!row.has_keys()) {
    const std::int64_t num_bytes = params.head_size * element_size(params.query_type);
    std::memset(out, 0, static_cast<std::size_t>(num_bytes));
    return;
  }
  const Denominator d = denominator(params, row.state, head, use_sinks);
  const float value_scale = params.value.scale_of(head / params.group_size()) *
                            params.kernels->unit[static_cast<int>(params.cache_type)];
  params.kernels->store_row[static_cast<int>(params.query_type)](
      row.output, d.rescale / d.sum * value_scale, params.head_size, out);
}

void write_result(const PagedAttentionParams& params, const AttentionRow& row, std::int64_t token,
                  std::int64_t head) {
  const bool use_sinks = params.sinks != nullptr;
  const std::int64_t offset = token * params.out_token_stride + head * params.out_head_stride;
  write_output(params, row, head, use_sinks,
               static_cast<std::byte*>(params.out) + offset * element_size(params.query_type));
  if (params.lse == nullptr) return;
  float& lse = params.lse[head * params.lse_head_stride + token * params.lse_token_stride];
  lse = -std::numeric_limits<float>::infinity();
  if (!row.has_keys()) return;
  const Denominator d = denominator(params, row.state, head, use_sinks);
  lse = d.max + std::log(d.sum);
}

}  // namespace paged_kv::cpu
