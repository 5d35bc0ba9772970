// SPDX-License-Identifier: Apache-2.0
//
// The partitions of paged_attention_v2: attention to 512 keys at a time, joined afterwards.
#pragma once

#include "paged_kv/math.h"

#include <algorithm>
#include <cstdint>

namespace paged_kv {

// Tokens a partition.
inline constexpr std::int64_t kPartitionSize = 512;

// How many partitions paged_attention_v2 needs for sequences of up to `max_seq_len` tokens.
[[nodiscard]] constexpr std::int64_t num_partitions(std::int64_t max_seq_len) noexcept {
  return std::max<std::int64_t>(1, ceil_div(max_seq_len, kPartitionSize));
}

// Where partitions leave their results. T may be void where the dtype is known elsewhere.
template <class T>
struct PartitionBuffers {
  float* exp_sums;    // [num_seqs, num_heads, max_partitions]: sum of exp(logit - max_logit)
  float* max_logits;  // [num_seqs, num_heads, max_partitions]; -inf: no visible key
  T* tmp_out;         // [num_seqs, num_heads, max_partitions, head_size]: the partition's result
  std::int64_t exp_sums_seq_stride, exp_sums_head_stride, exp_sums_partition_stride;
  std::int64_t max_logits_seq_stride, max_logits_head_stride, max_logits_partition_stride;
  std::int64_t tmp_out_seq_stride, tmp_out_head_stride, tmp_out_partition_stride;
};

}  // namespace paged_kv
