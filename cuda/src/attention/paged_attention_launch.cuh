// SPDX-License-Identifier: Apache-2.0
//
// What paged_attention.cu launches; each specialisation is compiled in a file of its own.
#pragma once

#include "paged_kv/cuda/dtype.cuh"
#include "paged_kv/cuda/paged_attention.h"

#include <cstdint>

namespace paged_kv::cuda {

// How the keys of a sequence are cut: v1 has one partition of all tokens, and no buffers.
struct Partitions {
  std::int32_t num_partitions;
  std::int32_t num_tokens;  // of a partition
  PartitionBuffers<void> buffers;

  [[nodiscard]] constexpr bool is_v1() const noexcept { return buffers.exp_sums == nullptr; }
};

// Attention to each partition: into `out` (v1) or the buffers (v2).
template <Element T, Element CacheT>
void launch_paged_attention(const PagedAttentionParams& params, const Partitions& partitions,
                            cudaStream_t stream);

// Joins the buffers' partitions into `out`.
void launch_paged_attention_reduce(const PagedAttentionParams& params, const Partitions& partitions,
                                   cudaStream_t stream);

// The length of a sequence that the kernels work with: see paged_attention.h.
[[nodiscard]] __device__ __forceinline__ std::int32_t usable_seq_len(const PagedAttentionParams& p,
                                                                     std::int64_t seq) {
  return max(0, min(p.seq_lens[seq], static_cast<std::int32_t>(p.max_seq_len)));
}

}  // namespace paged_kv::cuda
