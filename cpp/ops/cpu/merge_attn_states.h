// SPDX-License-Identifier: Apache-2.0
//
// Joins two attention results over disjoint sets of keys into the result over their union, from
// their log-sum-exp (arXiv 2501.01005, section 2.2; vLLM's merge_attn_states).
#pragma once

#include "ops/cpu/thread_runner.h"

#include <cstdint>

namespace paged_kv::cpu {

// T: float, Half, BFloat16. Strides in elements. The last dimension of outputs is dense.
template <class T>
struct MergeAttnStatesParams {
  T* output;                // [num_tokens, num_heads, head_size]
  float* output_lse;        // [num_heads, num_tokens] or null
  const T* prefix_output;   // [num_tokens, num_heads, head_size]
  const float* prefix_lse;  // [num_heads, num_tokens]
  const T* suffix_output;   // [num_tokens, num_heads, head_size]
  const float* suffix_lse;  // [num_heads, num_tokens]

  std::int64_t output_token_stride, output_head_stride;
  std::int64_t output_lse_head_stride, output_lse_token_stride;
  std::int64_t prefix_token_stride, prefix_head_stride;
  std::int64_t prefix_lse_head_stride, prefix_lse_token_stride;
  std::int64_t suffix_token_stride, suffix_head_stride;
  std::int64_t suffix_lse_head_stride, suffix_lse_token_stride;

  std::int64_t num_tokens, num_heads, head_size;
};

// O(num_tokens * num_heads * head_size). An LSE of -inf (or +inf, which some kernels give for an
// empty set) means "no keys": that side is not read. Both empty: zeros and -inf.
template <class T>
void merge_attn_states(const MergeAttnStatesParams<T>& params, const ThreadRunner& runner);

}  // namespace paged_kv::cpu
