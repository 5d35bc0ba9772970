// SPDX-License-Identifier: Apache-2.0
#include "cuda/src/attention/paged_attention_launch.cuh"
#include "paged_kv/cuda/dispatch.cuh"
#include "paged_kv/cuda/launch.h"
#include "paged_kv/cuda/paged_attention_config.h"
#include "paged_kv/cuda/reduce.cuh"
#include "paged_kv/math.h"

#include <cstdint>

namespace paged_kv::cuda {
namespace {

constexpr int kNumThreads = 128;
constexpr int kMaxHeadSize = static_cast<int>(kHeadSizes.back());

// Of one (head, sequence).
template <class T>
struct PartitionResults {
  VectorView<const float> exp_sums;
  VectorView<const float> max_logits;
  const T* tmp_out;
  std::int64_t tmp_out_stride;
};

template <class T>
__device__ PartitionResults<T> partition_results(const PartitionBuffers<void>& b, std::int64_t head,
                                                 std::int64_t seq, std::int32_t num_partitions) {
  return {
      .exp_sums = {b.exp_sums + seq * b.exp_sums_seq_stride + head * b.exp_sums_head_stride,
                   num_partitions, b.exp_sums_partition_stride},
      .max_logits = {b.max_logits + seq * b.max_logits_seq_stride + head * b.max_logits_head_stride,
                     num_partitions, b.max_logits_partition_stride},
      .tmp_out = static_cast<const T*>(b.tmp_out) + seq * b.tmp_out_seq_stride +
                 head * b.tmp_out_head_stride,
      .tmp_out_stride = b.tmp_out_partition_stride};
}

// The largest logit; warps find it each on their own.
__device__ float max_of(const VectorView<const float>& max_logits, int lane) {
  float result = -INFINITY;
  for (std::int64_t i = lane; i < max_logits.size; i += 32) result = fmaxf(result, max_logits[i]);
  return warp_max(result);
}

// Grid: (num_heads, num_seqs). Works for any number of partitions: weights of 32 at a time, one a
// lane.
template <class T>
__global__ void __launch_bounds__(kNumThreads)
    paged_attention_reduce_kernel(const __grid_constant__ PagedAttentionParams p,
                                  const __grid_constant__ Partitions partitions) {
  constexpr int kMaxDimsPerThread = kMaxHeadSize / kNumThreads;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const std::int64_t head = blockIdx.x;
  const std::int64_t seq = blockIdx.y;
  const std::int32_t num_used =
      ceil_div(usable_seq_len(p, seq), static_cast<std::int32_t>(kPartitionSize));
  const auto parts = partition_results<T>(partitions.buffers, head, seq, num_used);

  const float max_logit = max_of(parts.max_logits, lane);
  float lane_total = 0.0f;
  float sums[kMaxDimsPerThread] = {};
  for (std::int32_t first = 0; first < num_used; first += 32) {
    const std::int32_t own = first + lane;
    float own_weight = 0.0f;
    // Not -inf, which has no visible key: -inf - -inf would be NaN.
    if (own < num_used && parts.max_logits[own] != -INFINITY) {
      own_weight = parts.exp_sums[own] * __expf(parts.max_logits[own] - max_logit);
    }
    lane_total += own_weight;
    const std::int32_t count = min(32, num_used - first);
    for (std::int32_t i = 0; i < count; ++i) {
      const float weight = __shfl_sync(kFullWarp, own_weight, i);
      const T* part = parts.tmp_out + (first + i) * parts.tmp_out_stride;
#pragma unroll
      for (int j = 0; j < kMaxDimsPerThread; ++j) {
        const int d = thread + j * kNumThreads;
        if (d < p.head_size) sums[j] += weight * to_float(part[d]);
      }
    }
  }
  const float total = warp_sum(lane_total);
  T* out = static_cast<T*>(p.out) + seq * p.out_seq_stride + head * p.out_head_stride;
#pragma unroll
  for (int j = 0; j < kMaxDimsPerThread; ++j) {
    const int d = thread + j * kNumThreads;
    if (d < p.head_size) out[d] = from_float<T>(total == 0.0f ? 0.0f : sums[j] / total);
  }
}

template <class T>
void launch_reduce(const PagedAttentionParams& params, const Partitions& partitions,
                   cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(params.num_heads),
                  static_cast<unsigned>(params.seq_lens.size));
  launch(&paged_attention_reduce_kernel<T>, grid, kNumThreads, 0, stream, params, partitions);
}

}  // namespace

void launch_paged_attention_reduce(const PagedAttentionParams& params, const Partitions& partitions,
                                   cudaStream_t stream) {
  dispatch_float_dtype(params.dtype,
                       [&]<class T>() { launch_reduce<T>(params, partitions, stream); });
}

}  // namespace paged_kv::cuda
