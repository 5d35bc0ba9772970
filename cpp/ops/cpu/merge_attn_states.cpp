// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/merge_attn_states.h"

#include "ops/cpu/float16.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace paged_kv::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Weights of the two sides, which add up to 1 (or are both 0 or NaN), and the joint log-sum-exp.
struct MergeWeights {
  float prefix;
  float suffix;
  float lse;
};

MergeWeights merge_weights(float prefix_lse, float suffix_lse) {
  if (prefix_lse == kInfinity) prefix_lse = -kInfinity;
  if (suffix_lse == kInfinity) suffix_lse = -kInfinity;
  if (std::isnan(prefix_lse) || std::isnan(suffix_lse)) return {kNaN, kNaN, kNaN};
  const float max_lse = std::max(prefix_lse, suffix_lse);
  if (max_lse == -kInfinity) return {0.0f, 0.0f, -kInfinity};
  const float prefix = std::exp(prefix_lse - max_lse);
  const float suffix = std::exp(suffix_lse - max_lse);
  const float sum = prefix + suffix;
  return {prefix / sum, suffix / sum, max_lse + std::log(sum)};
}

template <class T>
void merge_row(T* output, const T* prefix, const T* suffix, const MergeWeights& weights,
               std::int64_t head_size) {
  // A side without keys may hold anything, NaN too, so weight 0 is not enough to leave it out.
  for (std::int64_t d = 0; d < head_size; ++d) {
    const float from_prefix = weights.prefix != 0 ? weights.prefix * to_float(prefix[d]) : 0.0f;
    const float from_suffix = weights.suffix != 0 ? weights.suffix * to_float(suffix[d]) : 0.0f;
    output[d] = to<T>(from_prefix + from_suffix);
  }
}

}  // namespace

template <class T>
void merge_attn_states(const MergeAttnStatesParams<T>& p, const ThreadRunner& runner) {
  constexpr std::int64_t kRowsPerTask = 16;
  parallel_for(
      runner, p.num_tokens * p.num_heads, kRowsPerTask, [&p](std::int64_t begin, std::int64_t end) {
        for (std::int64_t row = begin; row < end; ++row) {
          const std::int64_t token = row / p.num_heads;
          const std::int64_t head = row % p.num_heads;
          const MergeWeights weights = merge_weights(
              p.prefix_lse[head * p.prefix_lse_head_stride + token * p.prefix_lse_token_stride],
              p.suffix_lse[head * p.suffix_lse_head_stride + token * p.suffix_lse_token_stride]);
          merge_row(p.output + token * p.output_token_stride + head * p.output_head_stride,
                    p.prefix_output + token * p.prefix_token_stride + head * p.prefix_head_stride,
                    p.suffix_output + token * p.suffix_token_stride + head * p.suffix_head_stride,
                    weights, p.head_size);
          if (p.output_lse != nullptr) {
            p.output_lse[head * p.output_lse_head_stride + token * p.output_lse_token_stride] =
                weights.lse;
          }
        }
      });
}

template void merge_attn_states(const MergeAttnStatesParams<float>&, const ThreadRunner&);
template void merge_attn_states(const MergeAttnStatesParams<Half>&, const ThreadRunner&);
template void merge_attn_states(const MergeAttnStatesParams<BFloat16>&, const ThreadRunner&);

}  // namespace paged_kv::cpu
